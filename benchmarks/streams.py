"""The two streams against bare ZMQ moving the same bytes, between two processes: ``python -m benchmarks.streams``.

Bare ZMQ is one DEALER and one ROUTER that move the very bytes that our encoding of a group (of a request) makes, as one
frame made beforehand, without codec, checks or acknowledgements. Both use Unix sockets, as processes of one machine do;
"with keys" is the throughput of realsys over TCP with CURVE, as between machines, relative to that. "MB" are the bytes.
All take turns in one run, and "of bare" is the median of the paired ratios of throughput: what else runs on the machine
slows all of them.
"cpu of bare" is the same for the CPU time of both processes, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks._table import report
from realsys.cluster.stream.codec import encode_group, encode_message
from realsys.cluster.stream.master_stream import MasterStream
from realsys.cluster.stream.push_pull import Puller, Pusher, PushLimits
from realsys.cluster.stream.security import CurveKeys
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.model_calls import Empty
from realsys.types import Group, Ticket
from tests.support.training.sample_records import group_of, single_turn

ANSWERS = 8  # trajectories of a group
IN_FLIGHT = 4  # groups or requests
KEPT = 32  # groups the receiver holds, as a trainer holds a batch
DISTINCT = 8  # groups sent in turn: one alone would never leave the caches
PROMPT = 256
END = b"end"
BOUND_MS = 30_000  # no single wait of the benchmark may take longer


Contender = Callable[[], Awaitable[None]]


class Blob(msgspec.Struct):
    """A request as large as a trajectory."""

    sample_id: str
    data: memoryview


@dataclass(frozen=True)
class Case:
    tokens: int  # tokens of one trajectory
    groups: int  # pushed in one repetition
    requests: int  # made in one repetition


CASES = (Case(tokens=1_024, groups=400, requests=1_500), Case(tokens=32_768, groups=24, requests=160))


def make_group(tokens: int, seed: int) -> Group:
    rng = np.random.default_rng(seed)
    answer = tokens - PROMPT
    episodes = [
        single_turn(
            rng.integers(0, 150_000, tokens, dtype=np.int32),
            -rng.random(answer, dtype=np.float32),
            np.full(answer, 7, dtype=np.int32),
            1.0,
        )
        for _ in range(ANSWERS)
    ]
    return group_of(Ticket("t0", 0, 0), episodes)


def wire_bytes(group: Group) -> bytes:
    """Return the bytes that a push of ``group`` sends, as one frame."""
    return b"".join(bytes(frame) for frame in encode_group(group))


# the other process


def serve(pipe: Connection, keys: CurveKeys, folder: str) -> None:
    """Receive groups (bare and through Pullers) and answer requests (bare and through WorkerEndpoints)."""
    context = zmq.Context()
    bare_push = context.socket(zmq.ROUTER)
    bare_push.linger = 0
    bare_push.bind(f"ipc://{folder}/push")
    pullers = [Puller(keys=each) for each in (None, keys)]
    pipe.send([puller.address for puller in pullers])
    bare_master, addresses = pipe.recv()
    bare_request = context.socket(zmq.DEALER)
    bare_request.linger = 0
    bare_request.connect(bare_master)
    bare_request.send(b"hello")
    endpoints = [WorkerEndpoint(0, addresses[0]), WorkerEndpoint(0, addresses[1], keys=keys)]
    answering = [threading.Thread(target=answer_requests, args=(endpoint,)) for endpoint in endpoints]
    for thread in answering:
        thread.start()
    poller = zmq.Poller()
    for sock in (bare_push, bare_request, *(puller.socket for puller in pullers)):
        poller.register(sock, zmq.POLLIN)
    kept: deque[object] = deque(maxlen=KEPT)
    running = True
    while running:
        ready = dict(poller.poll(BOUND_MS))
        if not ready:
            break
        for puller in pullers:
            if puller.socket in ready:
                puller.drain(kept.append)
        if bare_push in ready:
            drain_bare(bare_push, kept)
        if bare_request in ready:
            running = answer_bare(bare_request)
    for each in (*answering, *endpoints, *pullers):
        each.join() if isinstance(each, threading.Thread) else each.close()
    context.destroy(linger=0)


def answer_requests(endpoint: WorkerEndpoint) -> None:
    while (request := endpoint.next_request(BOUND_MS / 1000)) is not None:
        if request.handler == "end":
            endpoint.reply(request, Empty())
            return
        request.decode(Blob)
        endpoint.reply(request, Empty())


def drain_bare(sock: zmq.Socket[bytes], kept: deque[object]) -> None:
    while True:
        try:
            frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if len(frames[1]) == len(END):
            sock.send_multipart([frames[0], END])
        else:
            kept.append(frames[1])


def answer_bare(sock: zmq.Socket[bytes]) -> bool:
    while True:
        try:
            frame = sock.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return True
        if len(frame) == len(END):
            return False
        sock.send(b"ok")


# this process


async def push_ours(pusher: Pusher, groups: Sequence[Group], count: int) -> None:
    remaining = iter(range(count))

    async def push_some() -> None:
        for i in remaining:
            await pusher.push(groups[i % len(groups)])

    await asyncio.gather(*(push_some() for _ in range(IN_FLIGHT)))


async def push_bare(sock: zmq.Socket[bytes], blobs: Sequence[bytes], count: int) -> None:
    for i in range(count):
        sock.send(blobs[i % len(blobs)], copy=False)
    sock.send(END)
    if not sock.poll(BOUND_MS):
        raise TimeoutError("bare receiver did not answer")
    sock.recv()


async def request_ours(stream: MasterStream, blob: Blob, count: int) -> None:
    remaining = iter(range(count))

    async def request_some() -> None:
        for _ in remaining:
            await stream.request(0, "blob", blob, Empty)

    await asyncio.gather(*(request_some() for _ in range(IN_FLIGHT)))


async def request_bare(sock: zmq.Socket[bytes], route: bytes, data: bytes, count: int) -> None:
    for i in range(count + IN_FLIGHT):
        if i >= IN_FLIGHT:
            if not sock.poll(BOUND_MS):
                raise TimeoutError("bare worker did not answer")
            sock.recv_multipart()
        if i < count:
            sock.send_multipart([route, data], copy=False)


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float  # both processes, all threads


class Meter:
    """Runs contenders in turns and measures what each costs."""

    def __init__(self, other_process: int, repetitions: int) -> None:
        self._processes = (os.getpid(), other_process)
        self._repetitions = repetitions

    async def turns(self, *contenders: Contender) -> list[list[Cost]]:
        """Return the costs of the contenders in each turn, whose first one changes; a first turn warms up."""
        turns: list[list[Cost]] = []
        for i in range(self._repetitions + 1):
            costs = {}
            first = i % len(contenders)
            for run in (*contenders[first:], *contenders[:first]):
                start, cpu = time.perf_counter(), self._cpu_seconds()
                await run()
                costs[run] = Cost(time.perf_counter() - start, self._cpu_seconds() - cpu)
            turns.append([costs[run] for run in contenders])
        return turns[1:]

    def _cpu_seconds(self) -> float:
        return sum(
            int(task.joinpath("schedstat").read_text().split()[0]) / 1e9
            for process in self._processes
            for task in Path(f"/proc/{process}/task").iterdir()
        )


def row(stream: str, case: Case, trajectories: int, size: float, turns: list[list[Cost]]) -> dict[str, object]:
    ours, bare, _ = (statistics.median(cost.seconds for cost in column) for column in zip(*turns, strict=True))
    ratios = sorted(b.seconds / o.seconds for o, b, _ in turns)
    megabytes = size * trajectories / 1e6
    return {
        "stream": stream,
        "tokens": case.tokens,
        "trajectories/s": trajectories / ours,
        "MB/s": megabytes / ours,
        "bare MB/s": megabytes / bare,
        "of bare": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "cpu of bare": statistics.median(b.cpu_seconds / o.cpu_seconds for o, b, _ in turns),
        "with keys": statistics.median(o.seconds / k.seconds for o, _, k in turns),
    }


async def measure(pipe: Connection, meter: Meter, keys: CurveKeys, folder: str) -> list[dict[str, object]]:
    """Return a row for each stream and case."""
    addresses = pipe.recv()
    context = zmq.Context()
    bare_push, bare_master = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
    bare_push.connect(f"ipc://{folder}/push")
    bare_master.bind(f"ipc://{folder}/master")
    streams = [MasterStream(keys=each) for each in (None, keys)]
    pipe.send((f"ipc://{folder}/master", [stream.address for stream in streams]))
    if not bare_master.poll(BOUND_MS):
        raise TimeoutError("the other process did not connect")
    route, _ = bare_master.recv_multipart()
    for stream in streams:
        await stream.barrier([0], BOUND_MS / 1000)
    pushers = [
        Pusher(lambda dp, at=at: at, [0], "rollout_worker/0", keys=each, limits=PushLimits(IN_FLIGHT))  # type: ignore[misc]
        for at, each in zip(addresses, (None, keys), strict=True)
    ]
    rows = []
    try:
        for case in CASES:
            groups = [make_group(case.tokens, seed) for seed in range(DISTINCT)]
            blobs = [wire_bytes(group) for group in groups]
            turns = await meter.turns(
                partial(push_ours, pushers[0], groups, case.groups),
                partial(push_bare, bare_push, blobs, case.groups),
                partial(push_ours, pushers[1], groups, case.groups),
            )
            rows.append(row("push-pull", case, case.groups * ANSWERS, len(blobs[0]) / ANSWERS, turns))
        for case in CASES:
            data = np.random.default_rng(0).bytes(12 * case.tokens)
            blob = Blob("t0/0", memoryview(data))
            encoded = encode_message(blob)
            turns = await meter.turns(
                partial(request_ours, streams[0], blob, case.requests),
                partial(request_bare, bare_master, route, encoded, case.requests),
                partial(request_ours, streams[1], blob, case.requests),
            )
            rows.append(row("request-reply", case, case.requests, len(encoded), turns))
        for stream in streams:
            await stream.request(0, "end", Empty(), Empty)
        bare_master.send_multipart([route, END])
    finally:
        for pusher in pushers:
            await pusher.close()
        for stream in streams:
            stream.close()
        context.destroy(linger=1000)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    here, there = multiprocessing.Pipe()
    keys = CurveKeys.generate()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, keys, folder), daemon=True)
        process.start()
        there.close()
        try:
            rows = uvloop.run(measure(here, Meter(process.pid or 0, repetitions), keys, folder))
        finally:
            process.join(timeout=5)
            process.kill()
    meta = {"repetitions": repetitions, "answers_per_group": ANSWERS, "in_flight": IN_FLIGHT}
    report("streams", rows, meta)


if __name__ == "__main__":
    main()

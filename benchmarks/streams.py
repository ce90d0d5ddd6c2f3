"""The two streams against bare ZMQ moving the same bytes, between two processes: ``python -m benchmarks.streams``.

Bare ZMQ is one DEALER and one ROUTER that move the very bytes that our encoding of a group (of a request) makes, as one
frame made beforehand, without codec, checks or acknowledgements. "MB" are those bytes. The two take turns in one run,
and "of bare" is the median of the paired ratios of throughput: what else runs on the machine slows both.
"cpu of bare" is the same for the CPU time of both processes, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks._table import report
from realsys.model_calls import Empty
from realsys.stream.codec import encode_group, encode_message
from realsys.stream.push_pull import Puller, Pusher, PushLimits
from realsys.stream.request_reply import MasterStream, WorkerEndpoint
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


def serve(pipe: Connection) -> None:
    """Receive groups (bare and through a Puller) and answer requests (bare and through a WorkerEndpoint)."""
    context = zmq.Context()
    bare_push = context.socket(zmq.ROUTER)
    bare_push.linger = 0
    port = bare_push.bind_to_random_port("tcp://127.0.0.1")
    puller = Puller()
    pipe.send((f"tcp://127.0.0.1:{port}", puller.address))
    bare_master, master_address = pipe.recv()
    bare_request = context.socket(zmq.DEALER)
    bare_request.linger = 0
    bare_request.connect(bare_master)
    bare_request.send(b"hello")
    endpoint = WorkerEndpoint(0, master_address)
    answering = threading.Thread(target=answer_requests, args=(endpoint,))
    answering.start()
    poller = zmq.Poller()
    for sock in (bare_push, puller.socket, bare_request):
        poller.register(sock, zmq.POLLIN)
    kept: deque[object] = deque(maxlen=KEPT)
    running = True
    while running:
        ready = dict(poller.poll(BOUND_MS))
        if not ready:
            break
        if puller.socket in ready:
            puller.drain(kept.append)
        if bare_push in ready:
            drain_bare(bare_push, kept)
        if bare_request in ready:
            running = answer_bare(bare_request)
    answering.join()
    endpoint.close()
    puller.close()
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
    """Runs a pair of contenders and measures what each costs."""

    def __init__(self, other_process: int, repetitions: int) -> None:
        self._processes = (os.getpid(), other_process)
        self._repetitions = repetitions

    async def paired(self, ours: Contender, bare: Contender) -> list[tuple[Cost, Cost]]:
        """Costs of (ours, bare), taking turns at going first; a first pair warms up."""
        pairs: list[tuple[Cost, Cost]] = []
        for i in range(self._repetitions + 1):
            costs = {}
            for run in (ours, bare) if i % 2 else (bare, ours):
                start, cpu = time.perf_counter(), self._cpu_seconds()
                await run()
                costs[run] = Cost(time.perf_counter() - start, self._cpu_seconds() - cpu)
            pairs.append((costs[ours], costs[bare]))
        return pairs[1:]

    def _cpu_seconds(self) -> float:
        return sum(
            int(task.joinpath("schedstat").read_text().split()[0]) / 1e9
            for process in self._processes
            for task in Path(f"/proc/{process}/task").iterdir()
        )


def row(stream: str, case: Case, trajectories: int, size: float, pairs: list[tuple[Cost, Cost]]) -> dict[str, object]:
    ours, bare = (statistics.median(cost.seconds for cost in column) for column in zip(*pairs, strict=True))
    ratios = sorted(b.seconds / o.seconds for o, b in pairs)
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
        "cpu of bare": statistics.median(b.cpu_seconds / o.cpu_seconds for o, b in pairs),
    }


async def measure(pipe: Connection, meter: Meter) -> list[dict[str, object]]:
    bare_push_address, puller_address = pipe.recv()
    context = zmq.Context()
    bare_push, bare_master = context.socket(zmq.DEALER), context.socket(zmq.ROUTER)
    bare_push.connect(bare_push_address)
    port = bare_master.bind_to_random_port("tcp://127.0.0.1")
    stream = MasterStream()
    pipe.send((f"tcp://127.0.0.1:{port}", stream.address))
    if not bare_master.poll(BOUND_MS):
        raise TimeoutError("the other process did not connect")
    route, _ = bare_master.recv_multipart()
    await stream.barrier([0], BOUND_MS / 1000)
    pusher = Pusher(lambda dp: puller_address, [0], "rollout_worker/0", limits=PushLimits(IN_FLIGHT))
    rows = []
    try:
        for case in CASES:
            groups = [make_group(case.tokens, seed) for seed in range(DISTINCT)]
            blobs = [wire_bytes(group) for group in groups]
            pairs = await meter.paired(
                lambda groups=groups, case=case: push_ours(pusher, groups, case.groups),
                lambda blobs=blobs, case=case: push_bare(bare_push, blobs, case.groups),
            )
            rows.append(row("push-pull", case, case.groups * ANSWERS, len(blobs[0]) / ANSWERS, pairs))
        for case in CASES:
            data = np.random.default_rng(0).bytes(12 * case.tokens)
            blob = Blob("t0/0", memoryview(data))
            encoded = encode_message(blob)
            pairs = await meter.paired(
                lambda blob=blob, case=case: request_ours(stream, blob, case.requests),
                lambda data=encoded, case=case: request_bare(bare_master, route, data, case.requests),
            )
            rows.append(row("request-reply", case, case.requests, len(encoded), pairs))
        await stream.request(0, "end", Empty(), Empty)
        bare_master.send_multipart([route, END])
    finally:
        await pusher.close()
        stream.close()
        context.destroy(linger=1000)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        rows = uvloop.run(measure(here, Meter(process.pid or 0, repetitions)))
    finally:
        process.join(timeout=5)
        process.kill()
    meta = {"repetitions": repetitions, "answers_per_group": ANSWERS, "in_flight": IN_FLIGHT}
    report("streams", rows, meta)


if __name__ == "__main__":
    main()

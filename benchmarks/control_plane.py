"""Cost of the trainer's control plane from 16 to 512 ModelWorkers: ``python -m benchmarks.control_plane``.

The master is the real one: plan of the minibatches, executor, streams with CURVE. A few processes hold the real
endpoints of all workers, whose handlers decode the request, do nothing and reply. A step has two calls on one actor
with tensor parallelism 4: ``actor_inf``, whose arrays come from the data rank that received each group, and
``actor_train``, which finds them in place. Numbers are medians of the steps.

    join           from the start of the endpoints to the barrier
    bare           a request of the same size with nothing but ZeroMQ: the floor (``benchmarks._bare_sockets``)
    empty          a request without content to every worker, until the last reply
    plan           minibatches and data ranks, CPU time
    moves          plan of the transfers, CPU time
    prepared       plans, holders and encoded requests of all transfers, CPU time, in a thread
    blocked        longest time of a step for which the event loop ran no other task, and its CPU time in it
    transfer, mfc  the requests of the step, sent again alone, until the last reply; MB and KB are their payloads
    cpu            CPU time of the master process, threads of ZeroMQ and encryption included
    loop           CPU time of the event loop: about the time of a call where workers have cores of their own
    endpoints      CPU time of the processes that hold the endpoints

The endpoints share the cores with the master: a time until the last reply contains their work. CPU times do not.
The endpoints of a process share its interpreter, too, and wait for each other there; in a run each has a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import math
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import uvloop

import realsys.train.master.executor as executor_module
from benchmarks._bare_sockets import Clocks, Times, round_trips
from benchmarks._processes import helper_processes
from benchmarks._table import report
from realsys.algorithm.minibatches import plan_minibatches, sequence_refs
from realsys.algorithm.sequence_buffer import owners_of
from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.stream.security import CurveKeys
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.cluster.topology import Mesh, routing_table, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.model_calls import (
    ClearRequest,
    Empty,
    InitializeRequest,
    MfcReply,
    MfcShare,
    TransferReply,
    TransferRequest,
)
from realsys.train.master.executor import GraphExecutor, Ownership
from realsys.train.master.model_workers import ModelWorkers
from realsys.types import SampleMeta

TENSOR, MINIBATCHES = 4, 4
PROCESSES = 4  # that hold the endpoints
BOUND_S = 300.0
STATS = {f"statistic_{number}": float(number) for number in range(20)}  # as many as a call of an actor reports
FLOW = Dataflow(
    [
        FunctionCall(
            "actor_inf",
            ACTOR,
            "actor_inf",
            frozenset({"tokens", "behav_logprobs", "versions"}),
            frozenset({"prox_logprobs"}),
        ),
        FunctionCall(
            "actor_train", ACTOR, "actor_train", frozenset({"tokens", "behav_logprobs", "prox_logprobs"}), trains=True
        ),
    ]
)
#: requests whose times are measured
CALLS = ("empty", "transfer", "mfc")
UNITS = ("ms", "cpu ms", "loop ms", "endpoints ms")
COLUMNS = (
    *(f"{name} {unit}" for name in ("bare", *CALLS) for unit in UNITS),
    "plan ms",
    "moves ms",
    "prepared ms",
    "blocked ms",
    "blocked loop ms",
    "step cpu ms",
    *(f"{name} {unit}" for name in ("transfer", "mfc", "clear") for unit in ("MB", "KB each")),
)
#: columns of which the exponent is reported
FITTED = [column for column in COLUMNS if column.endswith(("ms", "MB"))]


class Measured(dict[str, list[float]]):
    """Name -> numbers, one per step."""

    def __missing__(self, name: str) -> list[float]:
        self[name] = []
        return self[name]

    def add(self, name: str, times: Times) -> None:
        for unit, value in times.items():
            self[f"{name} {unit}"].append(value)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.items()}


class CountingStream(MasterStream):
    """A MasterStream that counts the bytes of its payloads by handler."""

    sent: defaultdict[str, int]

    def scatter(self, payloads: Mapping[int, bytes], handler: str, *args: Any, **kwargs: Any) -> Any:
        self.sent[handler] += sum(map(len, payloads.values()))
        return super().scatter(payloads, handler, *args, **kwargs)


class TimedWorkers(ModelWorkers):
    """ModelWorkers that keep the transfers and the call that they sent last, to send them again alone."""

    def __init__(self, stream: RoutedStream, mesh: Mesh) -> None:
        super().__init__(stream, {ACTOR: mesh}, BOUND_S)
        self._last: dict[str, Callable[[], asyncio.Future[Any]]] = {
            "empty": lambda: self.initialize(InitializeRequest(ACTOR, "/model"))
        }

    def transfer(self, *args: Any) -> Any:
        self._last["transfer"] = partial(super().transfer, *args)
        return super().transfer(*args)

    def run_mfc(self, *args: Any) -> Any:
        self._last["mfc"] = partial(super().run_mfc, *args)
        return super().run_mfc(*args)

    async def measure(self, name: str, measured: Measured) -> None:
        """Send a request while nothing else runs; measure the time until the last reply."""
        clocks = Clocks()
        await self._last[name]()
        measured.add(name, clocks.passed())


def serve(address: str, keys: CurveKeys, workers: Sequence[int], heads: set[int], pipe: Connection) -> None:
    """Serve the endpoints of ``workers``: start them when told, end when told."""
    logging.disable()  # each would report that the master has gone
    pipe.send("imported")
    pipe.recv()
    for worker in workers:
        endpoint = WorkerEndpoint(worker, address, keys=keys)
        stats = STATS if worker in heads else {}
        threading.Thread(target=answer, args=(endpoint, MfcReply(worker, stats)), daemon=True).start()
    pipe.recv()


def answer(endpoint: WorkerEndpoint, reply: MfcReply) -> None:
    replies: dict[str, tuple[Any, Any]] = {
        "initialize": (InitializeRequest, Empty()),
        "transfer": (TransferRequest, TransferReply(0)),
        "mfc": (MfcShare, reply),
        "clear": (ClearRequest, Empty()),
    }
    while True:
        request = endpoint.next_request(60.0)
        if request is not None:
            kind, content = replies[request.handler]
            request.decode(kind)
            endpoint.reply(request, content)


def endpoints(address: str, keys: CurveKeys, mesh: Mesh) -> contextlib.AbstractContextManager[list[Connection]]:
    """Processes that hold the endpoints of the workers."""
    heads = set(mesh.dp_heads())
    shares = [(address, keys, mesh.workers[share::PROCESSES], heads) for share in range(PROCESSES)]
    return helper_processes(serve, shares, BOUND_S)


def make_groups(mesh: Mesh, groups: int, size: int) -> list[list[SampleMeta]]:
    """Return a batch whose groups arrived at the data ranks in turn."""
    rng, heads = random.Random(7), mesh.dp_heads()
    return [
        [
            SampleMeta(
                f"{group:010d}.0/{episode}.0",
                f"{group:010d}",
                0,
                length := rng.randint(500, 8000),
                length - 200,
                float(rng.random() < 0.5),
                False,
                0,
                0,
                heads[group % len(heads)],
                episode=episode,
            )
            for episode in range(size)
        ]
        for group in range(groups)
    ]


async def watch_blocks(blocks: list[tuple[float, float]]) -> None:
    """Append how much later than asked this task runs, and the CPU time of the loop in that time, in milliseconds."""
    while True:
        began, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0.002)
        blocks.append((1000 * (time.perf_counter() - began) - 2, 1000 * (time.thread_time() - cpu)))


@contextlib.contextmanager
def planning_timed(measured: Measured) -> Iterator[None]:
    """Measure the CPU time of all plans of transfers inside the block, and of all that is prepared in a thread."""
    places = {"moves ms": (executor_module, "plan_call"), "prepared ms": (executor_module._GraphRun, "_plan_wave")}
    spent: dict[str, float] = dict.fromkeys(places, 0.0)

    def timed(column: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[column] += 1000 * (time.thread_time() - began)

        return call

    with contextlib.ExitStack() as patches:
        for column, (owner, name) in places.items():
            patches.enter_context(mock.patch.object(owner, name, timed(column, getattr(owner, name))))
        yield
    for column, value in spent.items():
        measured[column].append(value)


async def step(
    stream: CountingStream, workers: TimedWorkers, mesh: Mesh, groups: list[list[SampleMeta]], measured: Measured
) -> None:
    """Run one step, and measure it."""
    stream.sent = defaultdict(int)
    began = time.thread_time()
    plan = plan_minibatches(sequence_refs(groups), MINIBATCHES, mesh.layout.data)
    measured["plan ms"].append(1000 * (time.thread_time() - began))
    ownership = Ownership()
    ownership.add_owners(FLOW.source_keys, owners_of(groups))
    blocks: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch_blocks(blocks))
    began = time.process_time()
    with planning_timed(measured):
        await GraphExecutor(FLOW, {ACTOR: mesh}, workers).run(
            {ACTOR: plan}, ownership, step=1, version=0, args={"actor_train": {"lr": 1e-6}}
        )
    ids = [sample.sample_id for group in groups for sample in group]
    await workers.clear(await asyncio.to_thread(ownership.discard_samples, ids))
    measured["step cpu ms"].append(1000 * (time.process_time() - began))
    watching.cancel()
    for column, values in zip(("blocked ms", "blocked loop ms"), zip(*blocks, strict=True), strict=True):
        measured[column].append(max(values))
    for name, calls in (("transfer", 1), ("mfc", 2), ("clear", 2)):
        measured[f"{name} MB"].append(stream.sent[name] / calls / 1e6)
    for name in CALLS:
        await workers.measure(name, measured)


async def measure(workers: int, arguments: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    mesh = whole_mesh(ParallelLayout(data=workers // TENSOR, tensor=TENSOR))
    keys = CurveKeys.generate()
    stream = CountingStream(keys=keys, request_timeout_s=BOUND_S)
    stream.sent = defaultdict(int)
    calls = TimedWorkers(RoutedStream(stream, routing_table({ACTOR: mesh})), mesh)
    groups = make_groups(mesh, arguments.groups, arguments.size)
    with endpoints(stream.address, keys, mesh) as pipes:
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("start")
        await stream.barrier(mesh.workers, BOUND_S)
        join = time.perf_counter() - began
        await calls.initialize(InitializeRequest(ACTOR, "/model"))
        gc.freeze()  # as ``worker_main`` does
        for _ in range(arguments.steps):
            gc.collect()
            await step(stream, calls, mesh, groups, measured)
        stream.close()
        gc.unfreeze()
    numbers = measured.medians()
    for name in ("transfer", "mfc", "clear"):
        numbers[f"{name} KB each"] = 1000 * numbers[f"{name} MB"] / workers
    least = {f"least {name} {unit}": min(measured[f"{name} {unit}"]) for name in ("bare", *CALLS) for unit in UNITS}
    return {"workers": workers, "join s": join, **{column: numbers[column] for column in COLUMNS}, **least}


def exponent(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Slope of log(column) over log(workers), by least squares."""
    points = [(math.log(row["workers"]), math.log(max(1e-6, row[column]))) for row in rows]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return float(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description="Calls to many ranks.")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--size", type=int, default=16, help="rows of a group")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--name", default="control_plane", help="of the result")
    arguments = parser.parse_args()
    rows = []
    for workers in arguments.workers:
        measured = Measured()
        for times in round_trips(workers, PROCESSES, arguments.steps, BOUND_S):
            measured.add("bare", times)
        rows.append(uvloop.run(measure(workers, arguments, measured)))
        print(rows[-1], file=sys.stderr, flush=True)
    large = [row for row in rows if row["workers"] >= 64]
    exponents = {column: round(exponent(large, column), 2) for column in FITTED} if len(large) > 1 else {}
    report(arguments.name, rows, {**vars(arguments), "tensor": TENSOR, "exponents from 64": exponents})


if __name__ == "__main__":
    main()

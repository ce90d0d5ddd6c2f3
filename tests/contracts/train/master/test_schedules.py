"""Random dataflows on random meshes: no schedule deadlocks, whatever shares workers with whatever, and what can run at
the same time does.

First simulated, many hundred schedules; then the same executor over real streams with real collectives.
"""

import asyncio
import itertools
import queue
import random
import threading
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from realsys.algorithm.minibatches import plan_minibatches
from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint
from realsys.cluster.topology import Mesh, routing_table
from realsys.config.allocation import ParallelLayout
from realsys.config.dataflow import SOURCE_KEYS, Dataflow, FunctionCall
from realsys.model_calls import ClearRequest, Empty, MfcReply, MfcShare, TransferReply, TransferRequest
from realsys.train.master.executor import GraphExecutor, Ownership
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.megatron.mesh import form_meshes
from realsys.train.worker.call_service import execute, whole_request
from realsys.train.worker.data_manager import DataManager, array_size
from realsys.types import ARRAY_KEYS, METADATA_KEYS, SequenceRef
from tests.support.processes.config_trees import changed
from tests.support.streams.simulated_workers import Deadlock, SimulatedWorkers
from tests.support.training.sample_records import make_ref
from tests.support.training.train_ranks import run_ranks

BOUND_S = 60.0
MADE_KEYS = ("prox_logprobs", "ref_logprobs", "values", "advantages", "returns", "scores")


@dataclass(frozen=True)
class Case:
    """One step: a graph, the meshes of its roles, and the batch."""

    flow: Dataflow
    meshes: dict[str, Mesh]
    refs: list[SequenceRef]
    arrived: dict[str, list[int]]  # sample -> workers
    workers: int


def random_flow(rng, roles):
    """3 to 8 calls; each reads some of what the stream and earlier calls made."""
    made, unused = sorted(SOURCE_KEYS), rng.sample(MADE_KEYS, len(MADE_KEYS))
    calls = []
    for number in range(rng.randint(3, 8)):
        inputs = {"tokens", *rng.sample(made, rng.randint(0, min(3, len(made))))}
        outputs = {unused.pop() for _ in range(rng.randint(0, 2)) if unused}
        calls.append(FunctionCall(f"call{number}", rng.choice(roles), "any", frozenset(inputs), frozenset(outputs)))
        made += sorted(outputs)
    rng.shuffle(calls)
    return Dataflow(calls)


def random_mesh(rng, workers):
    """Anywhere: what other meshes use, a part of it, across it, or apart from it."""
    widest = rng.randint(1, workers)
    fitting = [
        layout
        for data, pipeline, tensor in itertools.product((1, 2, 3, 4), (1, 2), (1, 2))
        if (layout := ParallelLayout(data, pipeline, tensor)).world_size <= widest
    ]
    layout = rng.choice(fitting)
    return Mesh(layout, tuple(sorted(rng.sample(range(workers), layout.world_size))))


def random_refs(rng, step=0):
    refs = []
    for number in range(rng.randint(1, 8)):
        prompt, answer = rng.randint(1, 5), rng.randint(1, 30)
        refs.append(make_ref(f"t{step}/{number}", prompt + answer, prompt, 1.0, False, number))
    return refs


def random_case(seed):
    rng = random.Random(seed)
    workers = rng.randint(1, 8)
    meshes = {name: random_mesh(rng, workers) for name in ("actor", "critic", "ref", "reward")[: rng.randint(1, 4)]}
    refs = random_refs(rng)
    # Where everything is everywhere nothing moves, and only the meshes decide what can run at the same time.
    everywhere = list(range(workers)) if rng.random() < 0.5 else []
    arrived = {ref.sample_id: everywhere or [rng.randrange(workers)] for ref in refs}
    return Case(random_flow(rng, list(meshes)), meshes, refs, arrived, workers)


def owned(arrived):
    ownership = Ownership()
    ownership.add_owners(SOURCE_KEYS, {name: frozenset(workers) for name, workers in arrived.items()})
    return ownership


async def run_case(case, workers):
    """Run one step; at its end no worker may hold an array."""
    for sample, owners in case.arrived.items():
        for worker in owners:
            workers.held[worker] |= {(key, sample) for key in SOURCE_KEYS}
    ownership = owned(case.arrived)
    plans = {role: plan_minibatches(case.refs, 2, mesh.layout.data) for role, mesh in case.meshes.items()}
    async with workers.serving():
        executor = GraphExecutor(case.flow, case.meshes, workers)
        results = await executor.run(plans, ownership, step=1, version=0, args={})
        await workers.clear(ownership.discard_samples(list(case.arrived)))
    return results


def simulate(case, seed, kind=SimulatedWorkers):
    durations = random.Random(seed)

    async def run():
        workers = kind(
            case.flow, case.meshes, case.workers, turns=lambda: durations.randint(1, 12), score=lambda sample_id: 0.5
        )
        results = await run_case(case, workers)
        assert sorted(results) == sorted(call.name for call in case.flow.calls)
        assert not any(workers.held.values()), f"left after the step: {workers.held}"
        return workers

    return asyncio.run(run())


def span(workers, name):
    """First start and last end of a call over its workers, as positions in the event log."""
    indices = [i for i, event in enumerate(workers.events) if event.request == name]
    return min(indices), max(indices)


def check_order(case, workers):
    """Every call begins after all workers of those it reads from have ended."""
    makers = {key: call.name for call in case.flow.calls for key in call.outputs}
    for call in case.flow.calls:
        for key in call.inputs - SOURCE_KEYS:
            assert span(workers, call.name)[0] > span(workers, makers[key])[1], f"{call.name} began before its {key}"


def overlapping_pairs(case, workers):
    """Without transfers, calls on idle workers begin immediately: all of them must run together."""
    if any(len(owners) < case.workers for owners in case.arrived.values()):
        return 0
    busy: set[int] = set()
    free = []
    for call in case.flow.ready(SOURCE_KEYS, []):  # the order of sending
        places = set(case.meshes[call.role].workers)
        if places.isdisjoint(busy):
            free.append(call.name)
        busy |= places
    for a, b in itertools.combinations(free, 2):
        (began_a, ended_a), (began_b, ended_b) = span(workers, a), span(workers, b)
        assert began_a < ended_b and began_b < ended_a, f"{a} and {b} waited for one another"
    return len(free) * (len(free) - 1) // 2


def test_no_schedule_deadlocks_and_all_keep_their_order():
    overlapping = shared = 0
    for seed in range(500):
        case = random_case(seed)
        workers = simulate(case, seed)
        check_order(case, workers)
        overlapping += overlapping_pairs(case, workers)
        shared += any(
            a != b and set(a.workers) & set(b.workers) for a, b in itertools.combinations(case.meshes.values(), 2)
        )
    assert overlapping >= 30 and shared > 200, (
        f"the cases prove little: {overlapping} pairs, {shared} with shared workers"
    )


def test_calls_on_disjoint_meshes_run_in_parallel():
    """On shared workers they run one by one."""
    meshes = {
        "a": Mesh(ParallelLayout(data=2), (0, 1)),
        "b": Mesh(ParallelLayout(tensor=2), (2, 3)),
        "c": Mesh(ParallelLayout(data=2), (1, 2)),
    }
    flow = Dataflow([FunctionCall(role, role, "any", frozenset()) for role in meshes])
    refs = [make_ref("t/0", 5, 2, 1.0, False, 0), make_ref("t/1", 5, 2, 1.0, False, 1)]
    workers = simulate(Case(flow, meshes, refs, {"t/0": [0], "t/1": [1]}, 4), seed=7)
    (began_a, ended_a), (began_b, ended_b), (began_c, _) = (span(workers, name) for name in "abc")
    assert began_a < ended_b and began_b < ended_a
    assert began_c > min(ended_a, ended_b)
    starts = {(event.request, event.worker): i for i, event in enumerate(workers.events) if event.what == "start"}
    ends = {(event.request, event.worker): i for i, event in enumerate(workers.events) if event.what == "end"}
    assert starts["c", 1] > ends["a", 1] and starts["c", 2] > ends["b", 2]


class UnorderedWorkers(SimulatedWorkers):
    """The same, but each recipient gets a request in a separate task, some turns later: no order among them."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self._delays = random.Random(0)
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, sent):
        for worker in sent.workers:
            task = asyncio.create_task(self._later(worker, sent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _later(self, worker, sent):
        for _ in range(self._delays.randint(0, 4)):
            await asyncio.sleep(0)
        self.enqueue(worker, sent)


def test_without_one_order_of_sending_schedules_deadlock():
    """The check above can fail: the same executor, cases and workers, only the order of sending is not kept."""
    deadlocks = 0
    for seed in range(40):
        try:
            simulate(random_case(seed), seed, UnorderedWorkers)
        except Deadlock:
            deadlocks += 1
        except AssertionError:
            continue  # a call overtook its transfer, and its arrays were not there
    assert deadlocks >= 3


# ---- real streams, real collectives


class Stop(msgspec.Struct):
    """The last request of a test."""


MESHES = {  # actor and critic share worker 1; the reward model sits apart
    "actor": Mesh(ParallelLayout(pipeline=2), (0, 1)),
    "critic": Mesh(ParallelLayout(tensor=2), (1, 2)),
    "reward": Mesh(ParallelLayout(data=2), (3, 4)),
}
STEPS, REAL_WORKERS = 8, 5


def serve(rank, address, groups, device):
    """A ModelWorker in small: requests in order, transfers over torch.distributed, calls that all-reduce on a mesh."""
    data, endpoint, calls = DataManager(rank), WorkerEndpoint(rank, address), 0
    try:
        while True:
            request = endpoint.next_request(BOUND_S)
            assert request is not None, "the master fell silent"
            if request.handler == "stop":
                endpoint.reply(request, Empty())
                return calls, len(data)
            if request.handler == "transfer":
                received = execute(request.decode(TransferRequest), data, rank, device)
                endpoint.reply(request, TransferReply(received))
            elif request.handler == "clear":
                clearing = request.decode(ClearRequest)
                data.clear(clearing.sample_ids, clearing.keys)
                endpoint.reply(request, Empty())
            elif request.handler == "fill":
                fill(request.decode(TransferRequest).sequences, data)
                endpoint.reply(request, Empty())
            else:
                share = request.decode(MfcShare)
                role = share.request.role
                mfc = whole_request(share, groups[role].data)
                endpoint.reply(request, compute(mfc, rank, MESHES[role], groups[role].whole, data))
                calls += 1
    finally:
        endpoint.close()


def value_of(sample_id, key):
    if ARRAY_KEYS[key][0] == "bool":
        return 1.0
    return float(sum(f"{sample_id}:{key}".encode()) % 997)


def put(ref, keys, data):
    data.put(ref.sample_id, {key: np.full(array_size(ref, key), value_of(ref.sample_id, key)) for key in keys})


def fill(refs, data):
    for ref in refs:
        put(ref, sorted(SOURCE_KEYS), data)


def compute(request, rank, mesh, group, data):
    """Every rank adds up the values that it reads; the mesh's sum must equal the sum of the definition."""
    dp, tp, pp = mesh.coordinates(mesh.workers.index(rank))
    last = pp == mesh.layout.pipeline - 1
    total = expected = 0.0
    for d in range(mesh.layout.data):
        for ref in (ref for minibatch in request.minibatches for ref in minibatch[d]):
            for key in request.args["inputs"]:
                everywhere = key == "tokens"
                holders = mesh.layout.tensor * (mesh.layout.pipeline if everywhere else 1)
                expected += holders * array_size(ref, key) * value_of(ref.sample_id, key)
                if d == dp and (last or everywhere):
                    total += float(data.get(ref.sample_id, key).sum())
            if d == dp and last:
                put(ref, request.args["outputs"], data)
    for _ in range(3):  # several, so that ranks of different calls would meet in the wrong ones
        found = torch.tensor([total], dtype=torch.float64)
        dist.all_reduce(found, group=group)
        assert found.item() == expected, f"{request.mfc}: {found.item()} instead of {expected}"
    reply = MfcReply(rank, {"sum": expected})
    if request.args["scores"] and last and tp == 0:
        reply.scores = {ref.sample_id: 0.5 for minibatch in request.minibatches for ref in minibatch[dp]}
    return reply


async def drive(stream):
    """Run random steps like the step loop. Return the number of calls, and of those that overlapped another one."""
    routed = RoutedStream(stream, routing_table(MESHES))
    workers, rng = ModelWorkers(routed, MESHES, BOUND_S), random.Random(5)
    calls = beside = 0
    for step in range(STEPS):
        flow, refs = random_flow(rng, list(MESHES)), random_refs(rng, step)
        arrived = {ref.sample_id: [rng.randrange(REAL_WORKERS)] for ref in refs}
        for worker in range(REAL_WORKERS):
            here = [ref for ref in refs if worker in arrived[ref.sample_id]]
            await routed.request(worker, "fill", TransferRequest([], here), Empty)
        ownership = owned(arrived)
        args = {
            call.name: {
                "inputs": sorted(call.inputs - METADATA_KEYS),
                "outputs": sorted(call.outputs - METADATA_KEYS),
                "scores": "scores" in call.outputs,
            }
            for call in flow.calls
        }
        plans = {role: plan_minibatches(refs, 2, mesh.layout.data) for role, mesh in MESHES.items()}
        results = await GraphExecutor(flow, MESHES, workers).run(plans, ownership, step=step, version=0, args=args)
        await workers.clear(ownership.discard_samples(list(arrived)))
        calls += len(results)
        beside += sum(a.began < b.ended and b.began < a.ended for a, b in itertools.combinations(results.values(), 2))
    await routed.broadcast(range(REAL_WORKERS), "stop", Stop(), Empty)
    return calls, beside


@pytest.mark.timeout(120)
def test_random_calls_on_overlapping_meshes_with_real_collectives():
    def body(rank, device):
        groups = form_meshes(MESHES, rank, changed().cluster, device)
        addresses: queue.Queue[str] = queue.Queue()
        driven: list[tuple[int, int]] = []

        async def master():
            stream = MasterStream()
            addresses.put(stream.address)
            try:
                await stream.barrier(range(REAL_WORKERS), BOUND_S)
                driven.append(await drive(stream))
            finally:
                stream.close()

        thread = threading.Thread(target=lambda: asyncio.run(master()))
        if rank == 0:
            thread.start()
        shared = [addresses.get(timeout=BOUND_S) if rank == 0 else ""]
        dist.broadcast_object_list(shared, src=0)
        calls, left = serve(rank, shared[0], groups, device)
        if rank == 0:
            thread.join(BOUND_S)
        return calls, left, driven[0] if driven else None

    results = run_ranks(REAL_WORKERS, body, changed())
    assert results[0][2] is not None
    made, beside = results[0][2]
    assert made >= 30 and beside >= 5
    assert sum(calls for calls, _, _ in results) >= made
    assert [left for _, left, _ in results] == [0] * REAL_WORKERS, "samples left behind"

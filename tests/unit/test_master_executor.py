"""The executor: order of calls, what it moves, what it reports. The workers are a hand-written fake."""

import asyncio

import pytest

from realsys.cluster.topology import whole_mesh
from realsys.config.allocation import ParallelLayout
from realsys.errors import RemoteError
from realsys.master.executor import GraphExecutor, Ownership
from realsys.master.graph import Dataflow, FunctionCall, ppo_dataflow
from realsys.types import MfcReply, MfcRequest, SequenceRef


def ref(name: str) -> SequenceRef:
    return SequenceRef(name, 5, 2, 1.0, False, 0)


class FakeWorkers:
    """Applies transfers to a table of who holds what; fails on a read of something not held."""

    def __init__(self, mesh, inputs: dict[str, frozenset[str]], held: dict[int, set[tuple[str, str]]]) -> None:
        self.mesh, self.inputs, self.held = mesh, inputs, held
        self.calls: list[str] = []
        self.moved = 0

    async def __call__(self, workers, payload: MfcRequest) -> list[MfcReply]:
        self.calls.append(payload.mfc)
        await asyncio.sleep(0)
        for transfer in payload.transfers:
            for sample in transfer.sample_ids:
                for key in transfer.keys:
                    assert (key, sample) in self.held[transfer.src], f"{transfer.src} sends {key} of {sample} it lacks"
                    assert (key, sample) not in self.held[transfer.dst], f"{transfer.dst} gets {key} of {sample} twice"
                    self.held[transfer.dst].add((key, sample))
                    self.moved += 1
        last = self.mesh.layout.pipeline - 1
        for rank, worker in enumerate(self.mesh.workers):
            dp, _, pp = self.mesh.coordinates(rank)
            for minibatch in payload.minibatches:
                for sequence in minibatch[dp]:
                    keys = self.inputs[payload.mfc] if pp == last else {"tokens"}
                    for key in keys:
                        assert (key, sequence.sample_id) in self.held[worker], f"{worker} lacks {key} for {payload.mfc}"
                    if payload.mfc == "actor_inf" and pp == last:
                        self.held[worker].add(("prox_logprobs", sequence.sample_id))
        return [MfcReply(w, {"rank": float(w)}, seconds=float(w)) for w in workers]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_every_rank_gets_what_it_reads_and_nothing_twice(layout):
    mesh = whole_mesh(ParallelLayout(*layout))
    flow = ppo_dataflow(decoupled=True)
    held: dict[int, set[tuple[str, str]]] = {worker: set() for worker in mesh.workers}
    ownership = Ownership()
    names = [f"s{i}" for i in range(8)]
    for i, name in enumerate(names):  # everything arrived at the DP heads in turn, whatever the plan wants
        head = mesh.dp_head(i % layout[0])
        for key in flow.source_keys:
            held[head].add((key, name))
            ownership.add(key, name, head)
    plan = [[[ref(n) for n in names[m::2][dp :: layout[0]]] for dp in range(layout[0])] for m in range(2)]
    workers = FakeWorkers(mesh, {call.name: call.inputs for call in flow.calls}, held)
    executor = GraphExecutor(flow, {"actor": mesh}, workers)
    results = asyncio.run(executor.run({"actor": plan}, ownership, step=1, version=0, args={}))
    assert workers.calls == ["actor_inf", "actor_train"]
    assert results["actor_train"].stats == {"rank": float(mesh.dp_head(0))}
    assert results["actor_train"].seconds == mesh.layout.world_size - 1
    holders = {w for w in held if held[w]}
    assert ownership.forget(names) == holders
    assert ownership.forget(names) == set()
    if mesh.layout.world_size == 1:
        assert workers.moved == 0


def test_a_failing_call_ends_the_step_with_its_error():
    mesh = whole_mesh(ParallelLayout())
    flow = Dataflow([FunctionCall(n, "actor", n, frozenset({"tokens"})) for n in ("a", "b")], source_keys={"tokens"})
    never = asyncio.Event()
    cancelled: list[str] = []

    async def broadcast(workers, payload):
        if payload.mfc == "b":
            raise RemoteError("model_worker/0: b: out of memory")
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.append(payload.mfc)
            raise

    async def run():
        ownership = Ownership({"tokens": {"s": {0}}})
        executor = GraphExecutor(flow, {"actor": mesh}, broadcast)
        with pytest.raises(RemoteError, match="out of memory"):
            await executor.run({"actor": [[[ref("s")]]]}, ownership, step=1, version=0, args={})
        await asyncio.sleep(0)

    asyncio.run(run())
    assert cancelled == ["a"]

"""Runs the dataflow graph of one batch over the meshes.

    ready ──send──> transfer (sources, destinations) ─┐ into the workers' queues, before anything is awaited
                    mfc      (the role's mesh)       ─┘
    replied ──> its outputs are available ──> keys that nobody reads any more are cleared ──> what is ready now ──> ...

Consumes a batch (sequences in minibatches, per role) and who owns which arrays; waits for keys; a finished call
unblocks the calls that read what it made; produces each call's statistics.

**No deadlock.** A worker executes what it is sent one after the other, in the order of sending, and a request waits for
nothing but collectives and messages among its own recipients. The executor sends each request to all its recipients
before it sends another, so all requests stand in one global order that every worker's queue agrees with. By induction
over that order every request completes: when those before it have completed, none of its recipients has anything left
to do first, so each of them gets to it, and its collectives have all their participants. That holds for any meshes
(disjoint, nested, overlapping) and any durations. Calls on disjoint meshes share no queue, so they run at the same
time; calls that share a worker queue there. The queues are also why a transfer may count as done once it is sent: what
is sent later finds its arrays in place.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from realsys.buffer.redistribute import holders_of_outputs, plan_call
from realsys.cluster.topology import Mesh
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.errors import RewardError
from realsys.master.calls.ownership import Ownership
from realsys.types import (
    METADATA_KEYS,
    Empty,
    MfcReply,
    MfcRequest,
    SequenceRef,
    Transfer,
    TransferReply,
    TransferRequest,
)

SCORES = "scores"  # the one key that comes with the replies instead of staying on the workers

Minibatches = list[list[list[SequenceRef]]]  # [minibatch][dp rank] -> sequences


class Workers(Protocol):
    """Each call is sent to all ``workers`` before it returns; the future is their replies."""

    def transfer(self, workers: Iterable[int], payload: TransferRequest) -> asyncio.Future[list[TransferReply]]: ...
    def run_mfc(self, workers: Sequence[int], payload: MfcRequest) -> asyncio.Future[list[MfcReply]]: ...
    def clear(
        self, workers: Iterable[int], sample_ids: list[str], keys: Sequence[str] = ()
    ) -> asyncio.Future[list[Empty]]: ...


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one call reported.

    ``stats`` are reduced over the mesh; ``scores`` are those of all its samples. ``seconds``: of the slowest rank,
    without what it waited for in its queue; ``began`` and ``ended`` are the master's clock (perf_counter) at sending
    and at the last reply. ``received``: bytes that its transfers moved.
    """

    stats: dict[str, float]
    scores: dict[str, float]
    seconds: float
    began: float
    ended: float
    received: int


class GraphExecutor:
    """Executes one graph; one instance per graph, used for every step.

    ``score_weight``: a call that reads ``scores`` sees a sequence's reward plus this times its score.
    """

    def __init__(
        self, flow: Dataflow, meshes: Mapping[str, Mesh], workers: Workers, *, score_weight: float = 1.0
    ) -> None:
        self._flow, self._meshes, self._workers, self._score_weight = flow, meshes, workers, score_weight

    async def run(
        self,
        plans: Mapping[str, Minibatches],
        ownership: Ownership,
        *,
        step: int,
        version: int,
        args: Mapping[str, dict[str, Any]],
    ) -> dict[str, CallResult]:
        """Run every call once. ``plans`` maps role to its minibatches, ``args`` call name to extra arguments.

        ``ownership`` is kept up to date; what is left in it afterwards is the caller's to clear. Raises what a worker
        answered first (RemoteError, WorkerLost, WaitTimeout), RewardError for scores that are missing or not finite;
        calls still running are then given up.
        """
        graph_run = _GraphRun(
            self._flow, self._meshes, self._workers, self._score_weight, plans, ownership, step, version, args
        )
        return await graph_run.finish()


@dataclass(slots=True)
class _GraphRun:
    """One execution of the graph."""

    flow: Dataflow
    meshes: Mapping[str, Mesh]
    workers: Workers
    score_weight: float
    plans: Mapping[str, Minibatches]
    ownership: Ownership
    step: int
    version: int
    args: Mapping[str, dict[str, Any]]
    scores: dict[str, float] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    results: dict[str, CallResult] = field(default_factory=dict)
    running: dict[asyncio.Future[Any], FunctionCall | None] = field(default_factory=dict)  # None: a clearing

    async def finish(self) -> dict[str, CallResult]:
        try:
            self._send_ready()
            while self.running:
                done, _ = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
                finished = []
                for task in done:
                    call, outcome = self.running.pop(task), task.result()
                    if call is not None:
                        self._take(call, outcome)
                        finished.append(call)
                # Clearings first: behind the next calls in the queues they would free nothing while those run.
                self._clear_unread(finished)
                self._send_ready()
        finally:
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)
        return self.results

    @property
    def _available(self) -> set[str]:
        made = {key for call in self.flow.calls if call.name in self.results for key in call.outputs}
        return made | self.flow.source_keys

    def _send_ready(self) -> None:
        """Send what is ready: transfers among idle workers, then the calls in the order of their declaration.

        A source that got a call of its own first would keep the destination waiting for all of it. A destination that
        is busy, in turn, would keep the source waiting: such a transfer goes right before its call.
        """
        ready = self.flow.ready(self._available, self.started)
        busy = {w for call in self.running.values() if call is not None for w in self.meshes[call.role].workers}
        moving: dict[str, asyncio.Future[list[TransferReply]]] = {}
        began = time.perf_counter()
        for call in ready:
            transfers = self._plan(call)
            if transfers and busy.isdisjoint(_workers_of(transfers)):
                moving[call.name] = self._send_transfers(call, transfers)
        for call in ready:
            if call.name not in moving and (transfers := self._plan(call)):
                moving[call.name] = self._send_transfers(call, transfers)
            self.running[self._send_call(call, moving.get(call.name), began)] = call

    def _plan(self, call: FunctionCall) -> list[Transfer]:
        return plan_call(self.meshes[call.role], self.plans[call.role], call.inputs, self.ownership.owners)

    def _send_transfers(self, call: FunctionCall, transfers: Sequence[Transfer]) -> asyncio.Future[list[TransferReply]]:
        moved: set[str] = set()
        for transfer in transfers:
            owners = {sample_id: [transfer.dst] for sample_id in transfer.sample_ids}
            self.ownership.add_owners(transfer.keys, owners)
            moved |= owners.keys()
        plan = self.plans[call.role]
        refs = [ref for minibatch in plan for part in minibatch for ref in part if ref.sample_id in moved]
        return self.workers.transfer(_workers_of(transfers), TransferRequest(list(transfers), refs))

    def _send_call(
        self, call: FunctionCall, moving: asyncio.Future[list[TransferReply]] | None, began: float
    ) -> asyncio.Task[CallResult]:
        self.started.add(call.name)
        mesh = self.meshes[call.role]
        request = MfcRequest(
            mfc=call.name,
            role=call.role,
            handler=call.handler,
            step=self.step,
            version=self.version,
            minibatches=self._minibatches(call),
            args=self.args.get(call.name, {}),
            pre_hooks=list(call.pre_hooks),
            post_hooks=list(call.post_hooks),
        )
        computing = self.workers.run_mfc(mesh.workers, request)
        return asyncio.create_task(_result(mesh, moving, computing, began), name=f"mfc {call.name} step {self.step}")

    def _minibatches(self, call: FunctionCall) -> Minibatches:
        """The plan of the call's role; rewards include the scores if the call reads them."""
        plan = self.plans[call.role]
        if SCORES not in call.inputs:
            return plan
        scored = iter(add_scores(_flat(plan), self.scores, self.score_weight))
        return [[[next(scored) for _ in part] for part in minibatch] for minibatch in plan]

    def _take(self, call: FunctionCall, result: CallResult) -> None:
        minibatches = self.plans[call.role]
        if SCORES in call.outputs:
            self._check_scores(call, result.scores)
            self.scores = result.scores
        arrays = call.outputs - METADATA_KEYS
        self.ownership.add_owners(arrays, holders_of_outputs(self.meshes[call.role], minibatches))
        self.results[call.name] = result

    def _check_scores(self, call: FunctionCall, scores: Mapping[str, float]) -> None:
        wanted = [ref.sample_id for ref in _flat(self.plans[call.role])]
        bad = sorted(sample_id for sample_id in wanted if not math.isfinite(scores.get(sample_id, math.nan)))
        if bad:
            found = scores.get(bad[0], "no score")
            raise RewardError(
                f"{call.name} (role {call.role}), step {self.step}: {len(bad)} of {len(wanted)} samples have no finite "
                f"score, the first is {bad[0]}: {found}; look at the model in roles.{call.role}.path"
            )

    def _clear_unread(self, finished: Sequence[FunctionCall]) -> None:
        """Clear, on all holders, the arrays that no call will read any more.

        Only if one of ``finished`` was the last to read something, and not at the end, when the samples go as a whole.
        """
        if len(self.results) == len(self.flow.calls):
            return
        unread = {key for key in self.ownership.owners if not self._readers(key) - self.results.keys()}
        if not any(call.inputs & unread for call in finished):
            return
        samples = sorted({sample_id for key in unread for sample_id in self.ownership.owners[key]})
        if holders := self.ownership.drop(unread):
            self.running[self.workers.clear(sorted(holders), samples, sorted(unread))] = None

    def _readers(self, key: str) -> set[str]:
        return self.flow.last_consumers().get(key, set())


def add_scores(refs: Sequence[SequenceRef], scores: Mapping[str, float], weight: float) -> list[SequenceRef]:
    """Add ``weight`` times the score of an episode's last row to the reward of each of its rows."""
    of_episode = {ref.episode: scores[ref.sample_id] for ref in refs if ref.last}
    return [msgspec.structs.replace(ref, reward=ref.reward + weight * of_episode[ref.episode]) for ref in refs]


def _flat(plan: Minibatches) -> list[SequenceRef]:
    return [ref for minibatch in plan for part in minibatch for ref in part]


def _workers_of(transfers: Sequence[Transfer]) -> list[int]:
    """Sources and destinations."""
    return sorted({worker for transfer in transfers for worker in (transfer.src, transfer.dst)})


async def _result(
    mesh: Mesh,
    moving: asyncio.Future[list[TransferReply]] | None,
    computing: asyncio.Future[list[MfcReply]],
    began: float,
) -> CallResult:
    """The replies of transfer and call as one result. The first failure of either gives up the other."""
    both: list[asyncio.Future[Any]] = [computing] if moving is None else [computing, moving]
    try:
        await asyncio.gather(*both)
    finally:
        for future in both:
            future.cancel()
    replies = {reply.worker: reply for reply in computing.result()}
    heads = [replies[worker] for worker in mesh.dp_heads()]
    return CallResult(
        stats=heads[0].stats,
        scores={sample_id: score for reply in heads for sample_id, score in reply.scores.items()},
        seconds=max(reply.seconds for reply in replies.values()),
        began=began,
        ended=time.perf_counter(),
        received=sum(reply.received for reply in moving.result()) if moving is not None else 0,
    )

"""Runs the dataflow graph of one batch over the meshes.

    ready ──send──> transfer (sources, destinations) ─┐ into the workers' queues, before any reply is awaited
                    mfc      (the role's mesh)       ─┘
    replied ──> its outputs are available ──> keys without further readers are cleared ──> calls ready now ──> ...

Consumes a batch (sequences in minibatches, per role) and the owners of its arrays. It waits for
keys; a finished call unblocks the calls that read its outputs. It produces the statistics of each
call.

**No deadlock.** A worker serves its requests one at a time, in the order of sending. A request
waits for nothing but collectives and messages among its own recipients. The executor sends each
request to all its recipients before it sends another one, so there is one global order of requests
that every worker's queue agrees with. By induction over that order every request completes: when
all earlier requests have completed, no recipient has anything left to do before this one. So each
recipient reaches it, and its collectives have all their participants. This holds for any meshes
(disjoint, nested, overlapping) and any durations. Calls on disjoint meshes share no queue, so they
run at the same time; calls that share a worker queue on it. The queues also explain why a transfer
counts as done once it is sent: every request that is sent later finds its arrays in place.

**Off the loop.** A thread plans and encodes the transfers and the clear requests of a large batch. Meanwhile other
coroutines may send requests; these move no arrays and change no holders, so the plan is still right when it is sent.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from realsys.algorithm.redistribute import Holders, TransferPlan, holders_of_outputs, plan_call
from realsys.cluster.aio import first_completed
from realsys.cluster.stream.codec import encode_message
from realsys.cluster.topology import Mesh
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.errors import RewardError
from realsys.model_calls import Empty, MfcReply, MfcRequest, TransferReply
from realsys.observe import spans
from realsys.train.step_gate import StepAbandoned
from realsys.types import METADATA_KEYS, SequenceRef

T = TypeVar("T")

SCORES = "scores"  # the only key that replies carry; all others stay on the workers

#: rows of a batch from which its transfers are planned in a thread; a smaller plan takes about a millisecond
_OFF_LOOP = 256

Minibatches = list[list[list[SequenceRef]]]  # [minibatch][dp rank] -> sequences


class Workers(Protocol):
    """The requests that the executor sends.

    Each is sent to all its workers before the method returns, and each worker gets its own part.
    """

    def transfer(self, requests: Mapping[int, bytes]) -> asyncio.Future[list[TransferReply]]: ...
    def run_mfc(self, mesh: Mesh, payload: MfcRequest) -> asyncio.Future[list[MfcReply]]: ...
    def clear(self, samples: Mapping[int, list[str]], keys: Sequence[str] = ()) -> asyncio.Future[list[Empty]]: ...


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of one call.

    stats        reduced over the mesh
    scores       sample id -> reward of a reward model, for all samples of the call
    seconds      of the slowest rank, without its wait for earlier requests
    began, ended the master's clock (perf_counter) at sending and at the last reply
    received     bytes that the call's transfers moved
    abandoned    the run stops, and the call was not run to its end
    not_finite   arguments of the NotFiniteError that ended the call
    gpu          readings of the GPUs of its workers (``gpu_use``); empty on CPUs
    host_bytes   worker -> resident memory after the call
    """

    stats: dict[str, float]
    scores: dict[str, float]
    seconds: float
    began: float
    ended: float
    received: int
    abandoned: bool = False
    not_finite: tuple[str, int, list[str]] | None = None
    gpu: dict[str, float] = field(default_factory=dict)
    host_bytes: dict[int, int] = field(default_factory=dict)


class GraphExecutor:
    """Executor of one graph, used for every step.

    ``score_weight``: a call that reads ``scores`` sees a sequence's reward plus this times its
    score.
    """

    def __init__(
        self, flow: Dataflow, meshes: Mapping[str, Mesh], workers: Workers, *, score_weight: float = 1.0
    ) -> None:
        self._flow = flow
        self._meshes = meshes
        self._workers = workers
        self._score_weight = score_weight

    async def run(
        self,
        plans: Mapping[str, Minibatches],
        ownership: Ownership,
        *,
        step: int,
        version: int,
        args: Mapping[str, dict[str, Any]],
        scores: Mapping[str, float] | None = None,
    ) -> dict[str, CallResult]:
        """Run every call once; return the results by call name.

        ``plans``: role -> its minibatches. ``scores``: of a call before; then other graphs follow on the same arrays,
        and none is cleared. ``args``: call name -> extra arguments. ``version``: of
        the weights that the calls start with. ``ownership`` is kept up to date; the caller clears
        the arrays that are left in it.

        Raises the first error of a worker (RemoteError, WorkerLost, WaitTimeout), or RewardError
        for scores that are missing or not finite, or StepAbandoned. It stops waiting for the calls that still run.
        """
        graph_run = _GraphRun(
            self._flow, self._meshes, self._workers, self._score_weight, plans, ownership, step, version, args
        )
        if scores is not None:
            graph_run.scores, graph_run.clears = dict(scores), False
        return await graph_run.finish()


@dataclass(frozen=True, slots=True)
class _Wave:
    """Calls that are ready, and their transfers: call -> worker -> its TransferRequest, encoded.

    Those in ``first`` go before all calls.
    """

    calls: list[FunctionCall]
    first: dict[str, dict[int, bytes]]
    others: dict[str, dict[int, bytes]]


@dataclass(slots=True)
class _GraphRun:
    """One execution of the graph: the calls that are sent, the calls that have replied."""

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
    # None: a clear request
    running: dict[asyncio.Future[Any], FunctionCall | None] = field(default_factory=dict)
    clears: bool = True  # arrays without further readers

    async def finish(self) -> dict[str, CallResult]:
        """Send calls as they become ready, until all have replied; return their results."""
        try:
            await self._send_ready()
            while self.running:
                finished = self._collect(await first_completed(self.running))
                # Clear requests are sent first. Behind the next calls in a worker's queue they
                # would free no memory until those calls have run, and the peak would be that of two
                # waves.
                await self._clear_unread(finished)
                await self._send_ready()
        finally:
            # Only the waiting is cancelled: a request that was sent runs on its workers all the
            # same.
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)
        return self.results

    def _collect(self, done: Iterable[asyncio.Future[Any]]) -> list[FunctionCall]:
        """Record the results of completed requests; return the calls among them.

        Raises a worker's error.
        """
        finished = []
        for task in done:
            call = self.running.pop(task)
            result = task.result()
            if call is not None:
                if result.abandoned:
                    raise StepAbandoned(f"{call.name} of step {self.step} was abandoned: the run stops")
                self._record_result(call, result)
                finished.append(call)
        return finished

    @property
    def _available(self) -> set[str]:
        made = {key for call in self.flow.calls if call.name in self.results for key in call.outputs}
        return made | self.flow.source_keys

    async def _send_ready(self) -> None:
        """Send the transfers among idle workers, then the calls that are ready, in the order of their declaration."""
        ready = self.flow.ready(self._available, self.started)
        if not ready:
            return
        busy = {w for call in self.running.values() if call is not None for w in self.meshes[call.role].workers}
        began = time.perf_counter()
        async with self.ownership.planning:
            wave = await self._off_loop(self._plan_wave, ready, busy)
            # No await until all is sent: a request in between could reach a worker before a transfer and
            # its source after it.
            moving = {name: self.workers.transfer(requests) for name, requests in wave.first.items()}
            for call in wave.calls:
                if call.name in wave.others:
                    moving[call.name] = self.workers.transfer(wave.others[call.name])
                self.running[self._send_call(call, moving.get(call.name), began)] = call

    def _plan_wave(self, ready: list[FunctionCall], busy: set[int]) -> _Wave:
        """Plan the transfers of the calls that are ready, and count their destinations as holders.

        A source that has a call in its queue first would make the destination wait for the whole
        call, so transfers go before calls. A busy destination would make an idle source wait
        instead: such a transfer goes right before its call.
        """
        wave = _Wave(ready, {}, {})
        later: dict[str, TransferPlan] = {}
        for call in ready:
            plan = self._plan(call)
            if plan.transfers and busy.isdisjoint(plan.workers):
                wave.first[call.name] = self._take(call, plan)
            elif plan.transfers:
                later[call.name] = plan
        for call in ready:
            if call.name not in later:
                continue
            # Planned again: an earlier call's transfer may have brought the same arrays to these
            # workers.
            again = len(wave.first) + len(wave.others) > 0
            plan = self._plan(call) if again else later[call.name]
            if plan.transfers:
                wave.others[call.name] = self._take(call, plan)
        return wave

    def _plan(self, call: FunctionCall) -> TransferPlan:
        return plan_call(self.meshes[call.role], self.plans[call.role], call.inputs, self.ownership.owners)

    def _take(self, call: FunctionCall, plan: TransferPlan) -> dict[int, bytes]:
        # The destinations own the arrays from now on: their queues hold the transfer before
        # anything sent later.
        self.ownership.add_transfers(plan)
        requests = plan.by_worker(self.plans[call.role])
        distinct = {id(request): request for request in requests.values()}  # workers share some
        encoded = {key: encode_message(request) for key, request in distinct.items()}
        return {worker: encoded[id(request)] for worker, request in requests.items()}

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)``, computed in a thread if the batch is large."""
        plan = next(iter(self.plans.values()))
        rows = sum(len(part) for minibatch in plan for part in minibatch)
        return await asyncio.to_thread(work, *args) if rows >= _OFF_LOOP else work(*args)

    def _send_call(
        self, call: FunctionCall, moving: asyncio.Future[list[TransferReply]] | None, began: float
    ) -> asyncio.Task[CallResult]:
        # Marked before the reply: a later wave must not send the call a second time.
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
            inputs=sorted(call.inputs),
            outputs=sorted(call.outputs),
            pre_hooks=list(call.pre_hooks),
            post_hooks=list(call.post_hooks),
        )
        computing = self.workers.run_mfc(mesh, request)
        return asyncio.create_task(_result(mesh, moving, computing, began), name=f"mfc {call.name} step {self.step}")

    def _minibatches(self, call: FunctionCall) -> Minibatches:
        """Return the plan of the call's role. Rewards include the scores if the call reads them."""
        plan = self.plans[call.role]
        if SCORES not in call.inputs:
            return plan
        scored = iter(add_scores(_flat(plan), self.scores, self.score_weight))
        return [[[next(scored) for _ in part] for part in minibatch] for minibatch in plan]

    def _record_result(self, call: FunctionCall, result: CallResult) -> None:
        """Make the outputs of ``call`` available to the calls that read them."""
        minibatches = self.plans[call.role]
        if SCORES in call.outputs:
            self._check_scores(call, result.scores)
            self.scores = result.scores
        # Scores are no arrays on a worker. As owned arrays they would be planned into transfers.
        arrays = call.outputs - METADATA_KEYS
        self.ownership.add_owners(arrays, holders_of_outputs(self.meshes[call.role], minibatches))
        self.results[call.name] = result
        end = spans.now()
        spans.add("call", end - int(1e9 * (result.ended - result.began)), end, f"step/{self.step}", call=call.name)

    def _check_scores(self, call: FunctionCall, scores: Mapping[str, float]) -> None:
        # Checked here, on one process: a NaN reward would reach every advantage of its group on
        # every rank.
        planned = [ref.sample_id for ref in _flat(self.plans[call.role])]
        bad = sorted(sample_id for sample_id in planned if not math.isfinite(scores.get(sample_id, math.nan)))
        if bad:
            score = scores.get(bad[0], "no score")
            raise RewardError(
                f"{call.name} (role {call.role}), step {self.step}: {len(bad)} of {len(planned)} samples have no "
                f"finite score, the first is {bad[0]}: {score}; check the model in roles.{call.role}.path"
            )

    async def _clear_unread(self, finished: Sequence[FunctionCall]) -> None:
        """Clear, on all holders, the arrays that no call will read any more.

        Only after a call that was the last reader of a key. After the last call the caller clears
        whole samples.
        """
        if len(self.results) == len(self.flow.calls) or not self.clears:
            return
        # A call that is sent counts as a reader until it has replied: only replied calls are
        # subtracted.
        unread = {key for key in self.ownership.owners if not self._readers(key) - self.results.keys()}
        if not any(call.inputs & unread for call in finished):
            return
        if held := await self._off_loop(self.ownership.discard_keys, sorted(unread)):
            # Awaited with the calls, so that an error of a worker that only clears ends the run as
            # well.
            self.running[self.workers.clear(held, sorted(unread))] = None

    def _readers(self, key: str) -> set[str]:
        return self.flow.last_consumers().get(key, set())


def add_scores(refs: Sequence[SequenceRef], scores: Mapping[str, float], weight: float) -> list[SequenceRef]:
    """Return ``refs`` whose rewards are increased by ``weight`` times the score of their episode's
    last row.
    """
    of_episode = {ref.episode: scores[ref.sample_id] for ref in refs if ref.last}
    return [msgspec.structs.replace(ref, reward=ref.reward + weight * of_episode[ref.episode]) for ref in refs]


def _flat(plan: Minibatches) -> list[SequenceRef]:
    return [ref for minibatch in plan for part in minibatch for ref in part]


async def _result(
    mesh: Mesh,
    moving: asyncio.Future[list[TransferReply]] | None,
    computing: asyncio.Future[list[MfcReply]],
    began: float,
) -> CallResult:
    """Wait for the replies of transfer and call; return them as one result.

    If either fails, cancel the other.
    """
    both: list[asyncio.Future[Any]] = [computing] if moving is None else [computing, moving]
    try:
        await asyncio.gather(*both)
    finally:
        # After an error, gather leaves the other future running. Python would log its error as one
        # that was never retrieved.
        for future in both:
            future.cancel()
    replies = {reply.worker: reply for reply in computing.result()}
    # Statistics are reduced over the mesh, so one head has them all. Scores are not: each head has
    # its own samples.
    heads = [replies[worker] for worker in mesh.dp_heads()]
    seconds = max(reply.seconds for reply in replies.values())
    return CallResult(
        stats=heads[0].stats,
        scores={sample_id: score for reply in heads for sample_id, score in reply.scores.items()},
        seconds=seconds,
        began=began,
        ended=time.perf_counter(),
        received=sum(reply.received for reply in moving.result()) if moving is not None else 0,
        abandoned=any(reply.abandoned for reply in replies.values()),
        not_finite=heads[0].not_finite,
        gpu=gpu_use([reply.gpu for reply in replies.values() if reply.gpu], seconds),
        host_bytes={worker: reply.host_bytes for worker, reply in replies.items()},
    )


# ---- ownership


_NO_WORKER: Holders = frozenset()


@dataclass(slots=True)
class Ownership:
    """The holders of each array.

    ``owners[key][sample_id]``: the workers that hold the array when they serve the next request
    that is sent.
    """

    owners: dict[str, dict[str, Holders]] = field(default_factory=dict)
    #: held from a plan to the sending of its requests, by graphs that run at the same time
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add_owners(self, keys: Iterable[str], owners: Mapping[str, Holders]) -> None:
        """Add holders. ``owners``: sample id -> workers that hold all of ``keys``."""
        for key in keys:
            column = self.owners.setdefault(key, {})
            # Equal sets stay one object, by which the next plan groups samples.
            column |= {name: column[name] | new if name in column else new for name, new in owners.items()}

    def add_transfers(self, plan: TransferPlan) -> None:
        """Count the destinations as holders from now on."""
        for keys, samples, new in plan.holders:
            for key in keys:
                column = self.owners[key]
                for name in samples:
                    # An array may go to the last stage and to the others by two entries.
                    column[name] = new if column[name] <= new else column[name] | new

    def discard_keys(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """Discard these arrays of all samples; return worker -> samples of which it held any of them."""
        columns = [self.owners.pop(key, {}) for key in keys]
        return _held(columns, list(dict.fromkeys(name for column in columns for name in column)))

    def discard_samples(self, sample_ids: Sequence[str]) -> dict[int, list[str]]:
        """Discard these samples; return worker -> those of which it held any array."""
        held = _held(list(self.owners.values()), sample_ids)
        for column in self.owners.values():
            for name in sample_ids:
                column.pop(name, None)
        return held


def _held(columns: Sequence[Mapping[str, Holders]], sample_ids: Sequence[str]) -> dict[int, list[str]]:
    held: defaultdict[int, list[str]] = defaultdict(list)
    if not columns:
        return held
    rows = zip(*(map(column.get, sample_ids) for column in columns), strict=True)
    for name, holders_of_arrays in zip(sample_ids, rows, strict=True):
        # Many arrays of a sample share one object: a set of sets is smaller.
        for worker in _NO_WORKER.union(*filter(None, set(holders_of_arrays))):
            held[worker].append(name)
    return dict(sorted(held.items()))


# ---- use of the GPUs, from the readings in the replies of ModelWorkers
#
# reply   flops               model FLOPs of this rank in the call
#         computed_flops      the same with recomputed layers
#         peak_flops          peak FLOP/s of its GPU
#         peak_bytes          most memory that torch held
#         utilisation         share of the time since the last reply in which the GPU computed
#         used_bytes          most memory in use on the GPU, of all processes


_LARGEST = ("peak_bytes", "used_bytes")
_SHARES = {"mfu": "flops", "hfu": "computed_flops"}


def gpu_use(readings: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """Return the use of one call that took ``seconds``: ``mfu``, ``hfu``, maxima over the ranks, mean utilisation.

    A number that no rank has read is absent.
    """
    use = _merge(readings)
    peak = seconds * sum(reading.get("peak_flops", 0.0) for reading in readings)
    if peak:
        use |= {name: sum(each.get(key, 0.0) for each in readings) / peak for name, key in _SHARES.items()}
    return use


def step_gpu_use(calls: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the use of a step: maxima and means over its calls, ``mfu`` and ``hfu`` by call. Empty on CPUs."""
    shares = {share: {name: use[share] for name, use in calls.items() if share in use} for share in _SHARES}
    return {**_merge(list(calls.values())), **{share: found for share, found in shares.items() if found}}


def _merge(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in _LARGEST:
        if values := [reading[key] for reading in readings if key in reading]:
            found[key] = max(values)
    if values := [reading["utilisation"] for reading in readings if "utilisation" in reading]:
        found["utilisation"] = sum(values) / len(values)
    return found

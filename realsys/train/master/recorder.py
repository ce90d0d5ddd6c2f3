"""Record of each train step, for `realsys samples` and `realsys replay`.

    begin ──hold──> every worker keeps the arrays of the step that it is the first to hold
    (the calls run, arrays are cleared)
    end ──record──> every worker: its thread writes its arrays, and computes checksums of trained parameters
    saved           checksums of the weights that the step publishes; without a publication: ``digest``
    notice ``recorded`` of every worker with arrays or checksums ──> a thread commits batch.json and prunes

Consumes: the end of a train step. Waits for: the two requests only; the rest happens while the
next step trains. Produces: a folder as in ``realsys.train.record_files``. A record that cannot
be written is an error in the log, and that step cannot be replayed; the run continues without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from realsys.algorithm.redistribute import last_stage
from realsys.cluster.commit_folder import Removed
from realsys.cluster.files import FileInfo
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.topology import Mesh
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import Dataflow, role_settings
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import NotFiniteError, RecordError
from realsys.model_calls import Empty
from realsys.train import record_files as files
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints, directory_name
from realsys.train.master.executor import CallResult, Minibatches
from realsys.train.record_files import RECORD, StepRecord, number
from realsys.train.requests import (
    CopyWeightsRequest,
    DigestWeightsRequest,
    Recorded,
    RecordReply,
    RecordRequest,
    SaveWeightsReply,
)
from realsys.types import METADATA_KEYS, SampleMeta

log = logging.getLogger(__name__)


class RecordCalls(Protocol):
    """Calls of ``ModelWorkers`` that are used here: each goes to every worker, and is sent before it returns."""

    def hold(self, step: int, arrays: Mapping[int, dict[str, list[str]]]) -> asyncio.Future[list[Empty]]: ...
    def record(self, payload: RecordRequest) -> asyncio.Future[list[RecordReply]]: ...
    def copy_weights(self, payload: CopyWeightsRequest) -> asyncio.Future[list[Empty]]: ...
    def digest_weights(self, payload: DigestWeightsRequest) -> asyncio.Future[list[SaveWeightsReply]]: ...


class StepRecorder:
    """Writes the records of one trial."""

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        meshes: Mapping[str, Mesh],
        workers: RecordCalls,
        incarnation: str,
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``incarnation``: id of this trainer, whose lease ``check_alive`` checks."""
        self._root = paths.records
        self._checkpoints = paths.checkpoints
        self._meshes = meshes
        self._workers = workers
        self._incarnation = incarnation
        self._check_alive = check_alive
        self._seed = config.seed
        self._keep = config.record.keep_steps
        self._config = config.model_dump(mode="json")
        self._has_adapters = role_settings(config, ACTOR).lora.rank > 0
        self._timeout_s = config.cluster.request_timeout_s
        self._writing: dict[int, _Writing] = {}
        self._completing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def rewind(self, step: int) -> None:
        """Delete the records of steps after ``step``, which a recovery has undone."""
        removed = await asyncio.to_thread(files.discard_after, self._root, step)
        _log_problems(removed)
        if removed.gone:
            log.info("removed %d records of steps that are trained again", len(removed.gone))

    def begin(
        self,
        step: int,
        groups: list[list[SampleMeta]],
        flow: Dataflow,
        plans: Mapping[str, Minibatches],
        args: Mapping[str, dict[str, Any]],
    ) -> StepRecording:
        """Start the record of ``step``. Call it before the calls of the step are sent."""
        start = time.perf_counter()
        arrays = array_holders(groups, flow, plans, self._meshes)
        # the assignment of samples to ranks
        ids = {
            role: [[[ref.sample_id for ref in part] for part in minibatch] for minibatch in plan]
            for role, plan in sorted(plans.items())
        }
        record = StepRecord(
            step=step,
            version=step - 1,
            seed=self._seed,
            incarnation=self._incarnation,
            groups=groups,
            calls=[call.name for call in flow.calls],
            plan=xxhash.xxh3_64_hexdigest(msgspec.json.encode(ids)),
            args=dict(args),
            stats={},
            scores={},
            weights={},
            time=time.time(),
            config=self._config,
        )
        held = self._workers.hold(step, arrays)
        # If this request fails the calls of the step fail as well, and report it: no second report here.
        held.add_done_callback(lambda done: done.cancelled() or done.exception())
        digests = self._digests(flow)
        writers = set(arrays) | digests.keys()
        return StepRecording(self, self._workers, record, writers, digests, held, time.perf_counter() - start)

    def _digests(self, flow: Dataflow) -> dict[int, list[str]]:
        """Return worker -> trained roles of whose parameters it computes checksums: on data rank 0 only.

        The actor is published, and its adapters are not.
        """
        digests: dict[int, list[str]] = {}
        for role in flow.trained_roles:
            if role != ACTOR or self._has_adapters:
                for worker in self._meshes[role].dp_members(0):
                    digests.setdefault(worker, []).append(role)
        return digests

    def tmp(self, step: int) -> Path:
        """Return the folder to write to: one per incarnation, because a suspended worker of an earlier
        trainer may wake up and write."""
        return self._root / f"{directory_name(step)}.{self._incarnation}.tmp"

    def written(self, notice: Recorded) -> None:
        """Handle the notice ``recorded`` of a worker. A notice for a cancelled record is ignored."""
        writing = self._writing.get(notice.step)
        if writing is None:
            return
        writing.missing.discard(notice.worker)
        if notice.failure:
            writing.failures.append(notice.failure)
        elif notice.checksum:
            writing.files[files.worker_file(notice.worker)] = FileInfo(notice.size, notice.checksum)
        for role, checksums in notice.weights.items():
            writing.add_weights(role, notice.worker, checksums)
        self._complete_if_ready(writing)

    def saved(self, step: int, replies: Sequence[SaveWeightsReply]) -> None:
        """Take the checksums of the actor's weights after ``step``, which its publication has computed."""
        writing = self._writing.get(step)
        if writing is None:  # it could not be recorded
            return
        for reply in replies:
            writing.add_weights(ACTOR, reply.worker, reply.checksums)
        writing.has_actor = True
        self._complete_if_ready(writing)

    async def digest(self, step: int) -> None:
        """Have the checksums of the actor's weights computed after a ``step`` that publishes nothing."""
        await self._workers.copy_weights(CopyWeightsRequest(ACTOR, step))
        self.saved(step, await self._workers.digest_weights(DigestWeightsRequest(ACTOR, step)))

    def expect(self, record: StepRecord, workers: set[int], seconds: float) -> _Writing:
        """Register a step whose files ``workers`` are writing."""
        writing = self._writing[record.step] = _Writing(record, set(workers), seconds)
        return writing

    def done(self, writing: _Writing, record: StepRecord, seconds: float) -> None:
        """Complete ``writing`` with everything of the step except its files and checksums."""
        writing.record = record
        writing.whole = True
        writing.seconds += seconds
        self._complete_if_ready(writing)

    async def finish(self) -> None:
        """Return after the last step, once all records are on disk or ``request_timeout_s`` has passed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._writing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = {step: sorted(writing.missing) for step, writing in self._writing.items()}
            log.error("records not written within %g s; step -> late workers: %s", self._timeout_s, late)

    def _complete_if_ready(self, writing: _Writing) -> None:
        if writing.whole and writing.has_actor and not writing.missing:
            task = asyncio.create_task(self._complete(writing), name=f"record {writing.record.step}")
            self._completing.add(task)
            task.add_done_callback(self._completing.discard)

    async def _complete(self, writing: _Writing) -> None:
        infos = dict(sorted(writing.files.items()))
        record = msgspec.structs.replace(writing.record, files=infos, weights=writing.weights)
        problem = "; ".join(writing.failures)
        if not problem:
            try:
                removed = await asyncio.to_thread(self._commit, record)
            except (OSError, RecordError) as error:
                problem = str(error)
        if problem:
            log.error("step %d is not recorded: %s", record.step, problem)
            await asyncio.to_thread(RECORD.remove, [self.tmp(record.step)])
        else:
            _log_problems(removed)
            log.info(
                "recorded step %d: %.1f kB; training waited %.2f ms; pruned %d",
                record.step,
                sum(info.size for info in record.files.values()) / 1e3,
                1e3 * writing.seconds,
                len(removed.gone),
            )
        del self._writing[record.step]
        self._changed.set()

    def _commit(self, record: StepRecord) -> Removed:
        """Commit the record, and prune older ones. Raises OSError, RecordError."""
        tmp = self.tmp(record.step)
        tmp.mkdir(parents=True, exist_ok=True)  # no worker has made it if none had arrays
        RECORD.commit(tmp, self._root / directory_name(record.step), record, self._check_alive)
        checkpoints = [step for step, _ in complete_checkpoints(self._checkpoints)]
        return files.prune(self._root, self._keep, min(checkpoints, default=None))


async def check_finite(results: Mapping[str, CallResult], recorder: StepRecorder | None = None, step: int = 0) -> None:
    """Raise NotFiniteError if a call ended because of NaN or inf. The record of its ``step`` is on disk then."""
    for result in results.values():
        if problem := result.not_finite:
            if recorder is not None:
                await recorder.digest(step)
                await recorder.finish()
            raise NotFiniteError(*problem)


def _log_problems(removed: Removed) -> None:
    for folder, problem in removed.problems.items():
        log.error("record %s %s", folder, problem)


@dataclass(slots=True)
class _Writing:
    """A step whose files are being written.

    missing    workers that have not written their file, or not computed their checksums
    whole      True once the record lacks only the files and checksums
    has_actor  True once the checksums of the actor's weights are in ``weights``
    """

    record: StepRecord
    missing: set[int]
    seconds: float
    whole: bool = False
    has_actor: bool = False
    files: dict[str, FileInfo] = field(default_factory=dict)
    weights: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add_weights(self, role: str, worker: int, checksums: Mapping[str, str]) -> None:
        self.weights.setdefault(role, {}).setdefault(worker, {}).update(checksums)


@dataclass(slots=True)
class StepRecording:
    """A step in progress, between ``begin`` and ``end``."""

    recorder: StepRecorder
    workers: RecordCalls
    record: StepRecord
    writers: set[int]
    digests: dict[int, list[str]]
    held: asyncio.Future[list[Empty]]
    seconds: float

    def end(self, results: Mapping[str, CallResult]) -> asyncio.Future[None]:
        """Ask the workers to record, after the calls of the step. The request is sent before this returns.

        The future is done when every worker has replied.
        """
        start = time.perf_counter()
        step = self.record.step
        writing = self.recorder.expect(self.record, self.writers, self.seconds)
        replies = self.workers.record(RecordRequest(step, str(self.recorder.tmp(step)), self.digests))
        return asyncio.ensure_future(self._end(results, replies, writing, time.perf_counter() - start))

    async def _end(
        self,
        results: Mapping[str, CallResult],
        replies: asyncio.Future[list[RecordReply]],
        writing: _Writing,
        seconds: float,
    ) -> None:
        _, received = await asyncio.gather(self.held, replies)
        start = time.perf_counter()
        record = msgspec.structs.replace(
            self.record,
            stats={name: {key: number(x) for key, x in result.stats.items()} for name, result in results.items()},
            scores={key: number(x) for result in results.values() for key, x in result.scores.items()},
        )
        slowest = max((reply.seconds for reply in received), default=0.0)
        self.recorder.done(writing, record, seconds + slowest + time.perf_counter() - start)


def array_holders(
    groups: Sequence[Sequence[SampleMeta]],
    flow: Dataflow,
    plans: Mapping[str, Minibatches],
    meshes: Mapping[str, Mesh],
) -> dict[int, dict[str, list[str]]]:
    """Return worker -> key -> samples whose array this worker is the first to hold.

    The first holder is the receiver, for keys of the stream, and a DP head, for outputs of a call.
    """
    holders: dict[int, dict[str, list[str]]] = {}

    def add(worker: int, key: str, sample_ids: Iterable[str]) -> None:
        holders.setdefault(worker, {}).setdefault(key, []).extend(sample_ids)

    received: dict[int, list[str]] = {}
    for sample in (sample for group in groups for sample in group):
        received.setdefault(sample.owner, []).append(sample.sample_id)
    for owner, sample_ids in received.items():
        for key in sorted(flow.source_keys):
            add(owner, key, sample_ids)
    for call in flow.calls:
        parts = [(dp, refs) for minibatch in plans[call.role] for dp, refs in enumerate(minibatch)]
        for key in sorted(call.outputs - METADATA_KEYS):
            for dp, refs in parts:
                add(last_stage(meshes[call.role], dp)[0], key, [ref.sample_id for ref in refs])
    return holders

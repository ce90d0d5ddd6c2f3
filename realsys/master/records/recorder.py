"""The record of each train step, for `realsys samples` and `realsys replay`. Format: ``train.records.record_files``.

    begin ──hold──> every worker keeps the arrays of the step that it is the first to have
    (the calls run, arrays are cleared)
    end ──record──> every worker: checksums of its parameters; then its thread writes, beside what follows
    notices ``recorded`` of all that had arrays ──> batch.json, rename, prune: in a thread

Training waits for the two requests only. A record that cannot be written is an error in the log and a step that cannot
be replayed; it does not end the run, which needs it for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from realsys.buffer.redistribute import last_stage
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.topology import Mesh
from realsys.config.dataflow import Dataflow
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.master.calls.executor import CallResult, Minibatches
from realsys.train.checkpoint.checkpoint_files import FileInfo, complete_checkpoints, directory_name
from realsys.train.records import record_files as files
from realsys.train.records.messages import HoldRequest, Recorded, RecordReply, RecordRequest
from realsys.train.records.record_files import StepRecord, number
from realsys.types import METADATA_KEYS, Empty, SampleMeta

log = logging.getLogger(__name__)


class RecordCalls(Protocol):
    """What is used of ``ModelWorkers``: each call goes to every worker, and is sent before it returns."""

    def hold(self, payload: HoldRequest) -> asyncio.Future[list[Empty]]: ...
    def record(self, payload: RecordRequest) -> asyncio.Future[list[RecordReply]]: ...


class Recorder:
    """Writes the records of one trial. ``incarnation``: of the training side, whose lease ``check_alive`` looks at."""

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        meshes: Mapping[str, Mesh],
        workers: RecordCalls,
        incarnation: str,
        check_alive: CheckAlive = unleased,
    ) -> None:
        self._check_alive = check_alive
        self._root, self._checkpoints = paths.records, paths.checkpoints
        self._meshes, self._workers, self._incarnation = meshes, workers, incarnation
        self._seed, self._keep = config.seed, config.record.keep_steps
        self._config = config.model_dump(mode="json")
        self._timeout_s = config.cluster.request_timeout_s
        self._writing: dict[int, _Writing] = {}
        self._completing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def rewind(self, step: int) -> None:
        """Training goes on after ``step``: what was recorded of later steps, before a recovery, is undone."""
        try:
            gone = await asyncio.to_thread(files.forget_after, self._root, step)
        except OSError as error:
            log.error("records after step %d cannot be removed: %s", step, error)
            return
        if gone:
            log.info("removed %d records of steps that are trained again", len(gone))

    def begin(
        self,
        step: int,
        groups: list[list[SampleMeta]],
        flow: Dataflow,
        plans: Mapping[str, Minibatches],
        args: Mapping[str, dict[str, Any]],
    ) -> Recording:
        """Before the calls of ``step`` are sent."""
        start = time.perf_counter()
        arrays = array_holders(groups, flow, plans, self._meshes)
        record = StepRecord(
            step=step,
            version=step - 1,
            seed=self._seed,
            incarnation=self._incarnation,
            groups=groups,
            calls=[call.name for call in flow.calls],
            plan=plan_digest(plans),
            args=dict(args),
            stats={},
            scores={},
            weights={},
            time=time.time(),
            config=self._config,
        )
        held = self._workers.hold(HoldRequest(step, arrays))
        held.add_done_callback(lambda done: done.cancelled() or done.exception())  # the calls of the step fail with it
        return Recording(self, self._workers, record, set(arrays), held, time.perf_counter() - start)

    def tmp(self, step: int) -> Path:
        """Of this incarnation alone: a worker of an earlier one may wake up, and write."""
        return self._root / f"{directory_name(step)}.{self._incarnation}.tmp"

    def written(self, notice: Recorded) -> None:
        """Notice ``recorded`` of a worker. One of a step that was given up is left aside."""
        writing = self._writing.get(notice.step)
        if writing is None:
            return
        writing.missing.discard(notice.worker)
        if notice.failure:
            writing.failures.append(notice.failure)
        else:
            writing.found[files.worker_file(notice.worker)] = FileInfo(notice.size, notice.checksum)
        self._complete_if_ready(writing)

    def expect(self, record: StepRecord, workers: set[int], seconds: float) -> _Writing:
        """The files of ``workers`` are on their way."""
        writing = self._writing[record.step] = _Writing(record, set(workers), seconds)
        return writing

    def done(self, writing: _Writing, record: StepRecord, seconds: float) -> None:
        """All is known of the step but its files."""
        writing.record, writing.whole = record, True
        writing.seconds += seconds
        self._complete_if_ready(writing)

    async def finish(self) -> None:
        """No further step comes; returns when all records are on disk, or after ``request_timeout_s``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._writing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            late = {step: sorted(writing.missing) for step, writing in self._writing.items()}
            log.error("records not written within %g s, by step the workers: %s", self._timeout_s, late)

    def _complete_if_ready(self, writing: _Writing) -> None:
        if writing.whole and not writing.missing:
            task = asyncio.create_task(self._complete(writing), name=f"record {writing.record.step}")
            self._completing.add(task)
            task.add_done_callback(self._completing.discard)

    async def _complete(self, writing: _Writing) -> None:
        record = msgspec.structs.replace(writing.record, files=dict(sorted(writing.found.items())))
        problem = "; ".join(writing.failures)
        if not problem:
            try:
                gone = await asyncio.to_thread(self._commit, record)
            except OSError as error:
                problem = str(error)
        if problem:
            log.error("step %d is not recorded: %s", record.step, problem)
            await asyncio.to_thread(shutil.rmtree, self.tmp(record.step), ignore_errors=True)
        else:
            size, waited = sum(info.size for info in record.files.values()), 1e3 * writing.seconds
            log.info(
                "recorded step %d: %.1f kB; training waited %.2f ms; pruned %d", record.step, size / 1e3, waited, gone
            )
        del self._writing[record.step]
        self._changed.set()

    def _commit(self, record: StepRecord) -> int:
        """Returns how many older records went. Raises OSError."""
        tmp = self.tmp(record.step)
        tmp.mkdir(parents=True, exist_ok=True)
        (tmp / files.BATCH).write_bytes(files.encode_record(record))
        self._check_alive()
        tmp.rename(self._root / directory_name(record.step))
        checkpoints = [step for step, _ in complete_checkpoints(self._checkpoints)]
        return len(files.prune(self._root, self._keep, min(checkpoints, default=None)))


@dataclass(slots=True)
class _Writing:
    """A step whose files are being written. ``whole``: the record lacks only them."""

    record: StepRecord
    missing: set[int]  # workers
    seconds: float
    whole: bool = False
    found: dict[str, FileInfo] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    """A step that is under way, between ``begin`` and ``end``."""

    recorder: Recorder
    workers: RecordCalls
    record: StepRecord
    writers: set[int]
    held: asyncio.Future[list[Empty]]
    seconds: float

    def end(self, results: Mapping[str, CallResult]) -> asyncio.Future[None]:
        """The calls have run; sends before it returns. The future: every worker has answered."""
        start = time.perf_counter()
        step = self.record.step
        writing = self.recorder.expect(self.record, self.writers, self.seconds)
        replies = self.workers.record(RecordRequest(step, str(self.recorder.tmp(step))))
        return asyncio.ensure_future(self._end(results, replies, writing, time.perf_counter() - start))

    async def _end(
        self,
        results: Mapping[str, CallResult],
        replies: asyncio.Future[list[RecordReply]],
        writing: _Writing,
        seconds: float,
    ) -> None:
        _, answers = await asyncio.gather(self.held, replies)
        start = time.perf_counter()
        weights: dict[str, dict[int, dict[str, str]]] = {}
        for reply in answers:
            for role, digests in reply.weights.items():
                weights.setdefault(role, {})[reply.worker] = digests
        record = msgspec.structs.replace(
            self.record,
            stats={name: {key: number(x) for key, x in result.stats.items()} for name, result in results.items()},
            scores={key: number(x) for result in results.values() for key, x in result.scores.items()},
            weights=weights,
        )
        slowest = max((reply.seconds for reply in answers), default=0.0)
        self.recorder.done(writing, record, seconds + slowest + time.perf_counter() - start)


def array_holders(
    groups: Sequence[Sequence[SampleMeta]],
    flow: Dataflow,
    plans: Mapping[str, Minibatches],
    meshes: Mapping[str, Mesh],
) -> dict[int, dict[str, list[str]]]:
    """worker -> key -> samples whose array it is the first to have: of the stream its receiver, of a call a DP head."""
    found: dict[int, dict[str, list[str]]] = {}
    for sample in (sample for group in groups for sample in group):
        for key in sorted(flow.source_keys):
            found.setdefault(sample.owner, {}).setdefault(key, []).append(sample.sample_id)
    for call in flow.calls:
        for key in sorted(call.outputs - METADATA_KEYS):
            for part in plans[call.role]:
                for dp, refs in enumerate(part):
                    head = last_stage(meshes[call.role], dp)[0]
                    found.setdefault(head, {}).setdefault(key, []).extend(ref.sample_id for ref in refs)
    return found


def plan_digest(plans: Mapping[str, Minibatches]) -> str:
    """xxh3-64 of who works on what, in hex."""
    ids = {
        role: [[[ref.sample_id for ref in part] for part in minibatch] for minibatch in plan]
        for role, plan in sorted(plans.items())
    }
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(ids))

"""Replay of recorded train steps from the checkpoint before them: the same ModelWorkers and plans, no servers.

    checkpoint ──load──> roles
    for each step: record ──load──> the samples' owners ──> the calls, recorded again ──> compared, bit for bit

The records contain the decisions of the run: the batch and its order, owners, rewards, arguments. The
replay ends with the first unequal step: later steps would only show its consequences.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.topology import Mesh, place, routing_table
from realsys.cluster.worker import WorkerContext
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import dataflow_of, role_settings, saved_roles
from realsys.config.fields import replaced
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import RecordError
from realsys.model_calls import SNAPSHOT, InitializeRequest
from realsys.train import record_files as files
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints, find_checkpoint, read_state
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.recorder import StepRecorder
from realsys.train.master.step import StepRunner, cost_functions, plan_roles
from realsys.train.master.step_statistics import AGREEMENT
from realsys.train.record_files import Arrays, StepRecord, checksum
from realsys.train.requests import LoadCheckpointRequest, LoadRecordRequest, Recorded
from realsys.train.worker.data_manager import Array

log = logging.getLogger(__name__)


class ReplayJob(msgspec.Struct, frozen=True):
    """Steps to repeat, and the state before them.

    trial       folder of the trial
    checkpoint  folder of the checkpoint of step ``start``; empty: the models that the trial began with
    step        the last step to repeat
    tolerance   by which numbers may differ; 0: they must be bit-equal
    """

    trial: str
    checkpoint: str
    start: int
    step: int
    tolerance: float = 0.0

    @property
    def steps(self) -> range:
        """The steps to repeat."""
        return range(self.start + 1, self.step + 1)


class ReplayResult(msgspec.Struct, frozen=True):
    steps: list[StepComparison]

    @property
    def equal(self) -> bool:
        return all(step.equal for step in self.steps)


def replay_job(config: Config, paths: TrialPaths, step: int) -> ReplayJob:
    """Return the shortest replay that ends with ``step``. Raises RecordError, which lists the existing steps."""
    files.record_of_step(paths.records, step)
    starts = {saved: str(path) for saved, path in complete_checkpoints(paths.checkpoints)}
    if config.resume and (begun := find_checkpoint(Path(config.resume))).exists():
        starts.setdefault(read_state(begun).step, str(begun))
    if not config.resume and not config.warmup.steps:
        starts.setdefault(0, "")
    recorded = files.recorded_steps(paths.records)
    possible = {end: max((s for s in starts if s < end), default=-1) for end in recorded}
    possible = {e: s for e, s in possible.items() if s >= 0 and all(n in recorded for n in range(s + 1, e))}
    if step not in possible:
        problem = f"step {step} cannot be replayed: that needs a checkpoint before it, and records of the steps between"
        there = files.ranges(possible) if possible else "no step"
        raise RecordError(f"{paths.checkpoints}: {problem}; {there} can be (checkpoint.keep, checkpoint.every_steps)")
    start = possible[step]
    return ReplayJob(str(paths.root), starts[start], start, step)


async def replay(ctx: WorkerContext, stream: MasterStream) -> None:
    """Repeat the steps that replay.json (ReplayJob) names; write result.json (ReplayResult), equal
    or not.
    """
    config, root = ctx.config, ctx.paths.root
    job = msgspec.json.decode((root / "replay.json").read_bytes(), type=ReplayJob)
    await stream.barrier(range(parse_allocation(config.allocation).workers), config.cluster.start_timeout_s)
    meshes = meshes_of(config)
    workers = ModelWorkers(RoutedStream(stream, routing_table(meshes)), meshes, config.cluster.request_timeout_s)
    run = Replay(config, ctx.paths, job, workers)
    stream.on_notice("recorded", Recorded, run.recorder.written)
    result = await run.run()
    (root / "result.json").write_bytes(msgspec.json.encode(result))


class Replay:
    """One replay. ``paths``: the scratch folder, which gets all files; the trial is only read."""

    def __init__(self, config: Config, paths: TrialPaths, job: ReplayJob, workers: ModelWorkers) -> None:
        self._config = config
        self._paths = paths
        self._job = job
        self._workers = workers
        self._trial = TrialPaths(Path(job.trial))
        self._flow = dataflow_of(config)
        self._meshes = meshes_of(config)
        self.recorder = StepRecorder(config, paths, self._meshes, workers, "replay")
        plan = functools.partial(plan_roles, config, self._meshes, cost_functions(config, paths, list(self._meshes)))
        # A replay repeats the recorded comparisons of engine and trainer and plans none of its own.
        config = replaced(config, ["train", "engine_check"], 0.0)
        self._runner = StepRunner(config, self._flow, self._meshes, plan, workers, self.recorder)

    async def run(self) -> ReplayResult:
        """Replay and compare the steps. Raises RecordError for a damaged record, CheckpointError, ModelError."""
        config = self._config
        trained = {*self._flow.trained_roles, *([ACTOR] if config.warmup.steps else [])}
        requests = [
            InitializeRequest(role, str(role_settings(config, role).model_dir(self._paths)), role in trained)
            for role in self._meshes
        ]
        await asyncio.gather(*(self._workers.initialize(request) for request in requests))
        if self._job.checkpoint:
            roles = saved_roles(config, self._flow)
            loads = [LoadCheckpointRequest(role, self._job.checkpoint) for role in roles]
            await asyncio.gather(*(self._workers.load_checkpoint(load) for load in loads))
        log.info("loaded %s", self._job.checkpoint or "the models that the trial began with")
        comparisons: list[StepComparison] = []
        for step in self._job.steps:
            comparisons.append(await self._repeat(step))
            if not comparisons[-1].equal:
                break
        return ReplayResult(comparisons)

    async def _repeat(self, step: int) -> StepComparison:
        began = time.perf_counter()
        directory = files.record_of_step(self._trial.records, step)
        recorded = await asyncio.to_thread(files.read_record, directory)
        arrays, _ = await asyncio.to_thread(files.read_arrays, directory, recorded)
        await self._workers.load_record(LoadRecordRequest(str(directory)))
        await self._runner.run(step, self._runner.hold(recorded.groups), recorded.args)
        await self.recorder.digest(step)  # a replay publishes nothing
        await self.recorder.finish()
        again = files.record_of_step(self._paths.records, step)
        replayed = await asyncio.to_thread(files.read_record, again)
        replayed_arrays, _ = await asyncio.to_thread(files.read_arrays, again, replayed)
        comparison = compare(recorded, replayed, arrays, replayed_arrays, self._job.tolerance)
        for difference in comparison.first:
            log.error("step %d is not equal: %s", step, difference)
        return msgspec.structs.replace(comparison, seconds=time.perf_counter() - began)


def meshes_of(config: Config) -> dict[str, Mesh]:
    """Return the mesh of every role, as the run had them."""
    roles: Mapping[str, None] = dict.fromkeys([ACTOR, *dataflow_of(config).roles])
    return place(parse_allocation(config.allocation), roles)


# ---- comparison of a recorded step with its replay, bit by bit or within a tolerance
#
# plan, calls ──> scores, statistics, arrays that the calls made ──> parameters after the step
class Difference(msgspec.Struct, frozen=True):
    """The first unequal item of its kind."""

    what: str  # kind: plan, statistic, ...
    name: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.what} {self.name}: recorded {self.recorded}, replayed {self.replayed}"


class StepComparison(msgspec.Struct, frozen=True):
    """Result for one step.

    compared  kind -> number of compared items
    unequal   kind -> number of unequal items
    first     first difference of each kind that has one
    """

    step: int
    sequences: int
    compared: dict[str, int]
    unequal: dict[str, int]
    first: list[Difference]
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.first


def compare(
    recorded: StepRecord, replayed: StepRecord, arrays: Arrays, replayed_arrays: Arrays, tolerance: float = 0.0
) -> StepComparison:
    """Compare everything of a step.

    With a ``tolerance`` numbers may differ by that much, relative or absolute, whichever allows more. Parameters
    are then left out, because their checksums do not say how far apart they are.

    The kinds are in the order in which each produces the next, so the first difference is nearest to the
    cause.
    """
    kinds: dict[str, tuple[Mapping[Any, Any], Mapping[Any, Any]]] = {
        "plan": ({"of the batch": recorded.plan}, {"of the batch": replayed.plan}),
        "call": (dict.fromkeys(recorded.calls, "run"), dict.fromkeys(replayed.calls, "run")),
        "score": (recorded.scores, replayed.scores),
        "array": (_named(arrays), _named(replayed_arrays)),
        "statistic": (dict(_statistics(recorded)), dict(_statistics(replayed))),
    }
    if not tolerance:
        kinds["parameter"] = (dict(_parameters(recorded)), dict(_parameters(replayed)))
    compared: dict[str, int] = {}
    unequal: dict[str, int] = {}
    first: list[Difference] = []
    for what, (ours, theirs) in kinds.items():
        names = list(dict.fromkeys([*ours, *theirs]))
        different = [name for name in names if not _same(ours.get(name), theirs.get(name), tolerance)]
        if names:
            compared[what], unequal[what] = len(names), len(different)
        if different:
            name = different[0]
            first.append(Difference(what, name, *_shown(ours.get(name), theirs.get(name))))
    sequences = sum(len(group) for group in recorded.groups)
    return StepComparison(recorded.step, sequences, compared, unequal, first)


def _named(arrays: Arrays) -> dict[str, Array]:
    return {f"{key} of sample {sample_id}": array for (sample_id, key), array in sorted(arrays.items())}


def _statistics(record: StepRecord) -> Iterator[tuple[str, Any]]:
    for call, stats in record.stats.items():
        # Such tokens were scored with weights of an earlier version, which a replay does not have.
        scored_older = bool(record.args.get(call, {}).get(SNAPSHOT, {}).get("samples"))
        for name, value in stats.items():
            if not (scored_older and name.startswith(AGREEMENT)):
                yield f"{call}/{name}", value


def _parameters(record: StepRecord) -> Iterator[tuple[str, str]]:
    for role, by_worker in record.weights.items():
        for worker, digests in sorted(by_worker.items()):
            for name, value in digests.items():
                yield f"{role} on model_worker/{worker}: {name}", value


def _same(ours: Any, theirs: Any, tolerance: float) -> bool:
    if tolerance and _are_numbers(ours, theirs):
        return bool(np.allclose(theirs, ours, rtol=tolerance, atol=tolerance, equal_nan=True))
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and checksum(ours) == checksum(theirs)
    # repr distinguishes -0.0 from 0.0, which == does not
    return type(ours) is type(theirs) and repr(ours) == repr(theirs)


def _are_numbers(ours: Any, theirs: Any) -> bool:
    """Return True for two floats, and for two arrays of them of the same shape."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return bool(ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.dtype.kind == "f")
    return isinstance(ours, float) and isinstance(theirs, float)


def _shown(ours: Any, theirs: Any) -> tuple[str, str]:
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray) and len(ours) == len(theirs):
        bytes_of = (np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1) for a in (ours, theirs))
        at = int(np.argmax(np.any(np.not_equal(*bytes_of), axis=1)))
        return f"{ours[at]!r} at token {at}", f"{theirs[at]!r}"
    return _text(ours), _text(theirs)


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{len(value)} elements" if isinstance(value, np.ndarray) else str(value)

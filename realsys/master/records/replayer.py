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
from collections.abc import Mapping
from pathlib import Path

import msgspec

from realsys.cluster.topology import Mesh, place
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import dataflow_of, saved_roles
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.errors import RecordError
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.plans import cost_functions, plan_roles
from realsys.master.records.compare import Comparison, compare
from realsys.master.records.recorder import Recorder
from realsys.master.step import StepRunner
from realsys.model_calls import InitializeRequest
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints, find_checkpoint, read_state
from realsys.train.checkpoint.checkpoint_messages import LoadCheckpointRequest
from realsys.train.records import record_files as files
from realsys.train.records.record_messages import LoadRecordRequest

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
    steps: list[Comparison]

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
        self.recorder = Recorder(config, paths, self._meshes, workers, "replay")
        plan = functools.partial(plan_roles, config, self._meshes, cost_functions(config, paths, list(self._meshes)))
        # A replay repeats the recorded comparisons of engine and trainer and plans none of its own.
        agreement = config.agreement.model_copy(update={"sample_tokens": 0})
        config = config.model_copy(update={"agreement": agreement})
        self._runner = StepRunner(config, self._flow, self._meshes, plan, workers, self.recorder)

    async def run(self) -> ReplayResult:
        """Replay and compare the steps. Raises RecordError for a damaged record, CheckpointError, ModelError."""
        await self._load()
        comparisons: list[Comparison] = []
        for step in self._job.steps:
            comparisons.append(await self._repeat(step))
            if not comparisons[-1].equal:
                break
        return ReplayResult(comparisons)

    async def _load(self) -> None:
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

    async def _repeat(self, step: int) -> Comparison:
        began = time.perf_counter()
        directory = files.record_of_step(self._trial.records, step)
        recorded = await asyncio.to_thread(files.read_record, directory)
        arrays, _ = await asyncio.to_thread(files.read_arrays, directory, recorded)
        await self._workers.load_record(LoadRecordRequest(str(directory)))
        await self._runner.run(step, recorded.groups, recorded.args)
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

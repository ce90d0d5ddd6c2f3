"""Evaluations: held-out accuracy, sampled through the same servers and RolloutWorkers as training.

request ──> manager samples it ──> ended ──> statistics, votes, stored completions ──> step log
                                              (in a thread: training goes on)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.cluster.aio import on_disk
from realsys.cluster.worker import WorkerContext
from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets, id_of_set
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.errors import RecordError, StuckError, WaitTimeout, WeightsError
from realsys.manager.client import ManagerClient
from realsys.manager.messages import EvaluateRequest, EvaluationReply, RollBackRequest
from realsys.observe import spans
from realsys.observe.evaluation_records import (
    EvalSample,
    EvaluationOutcome,
    Tally,
    collect,
    majority_of,
    record,
    write_result,
)
from realsys.reward.pool import AnswerComparer
from realsys.train.master.publish import VersionKey, unserved
from realsys.train.master.recovery import NOTHING
from realsys.train.master.step_statistics import RunStatus, StepLog
from realsys.types import PublishedVersion
from realsys.weights.disk.plain_folders import adopt, step_of, verify

log = logging.getLogger(__name__)

POLL_S = 0.2
STATUS_INTERVAL_S = 5.0  # between two reads of the manager's status

#: Repairs the newest version if the manager's status says that no server can load it.
Repair = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Requested:
    """A requested evaluation.

    made          its data set
    shown         name in the step log
    step          the step after which it was due
    requested_at  the step of the weights that were the newest when it was requested
    started       monotonic seconds
    """

    made: EvaluationSet
    shown: str
    step: int
    requested_at: int
    started: float


class ResultWriter:
    """Writer of the results of ended evaluations: completions that count, votes, the record. Without state."""

    def __init__(self, config: Config, root: Path) -> None:
        """``root``: ``paths.evaluations``."""
        self._config = config
        self._root = root

    def write(
        self, eval_id: str, made: EvaluationSet, result: dict[str, Any], state: EvaluationReply
    ) -> dict[str, Any]:
        """Store an evaluation and return its record, with the majority vote if there is one. Blocks."""
        folder = self._root / eval_id
        try:
            samples = collect(folder, state.accepted)
            if result["complete"] and made.samples > 1 and len(samples) == state.done:
                result = result | self._vote(made, samples)
            write_result(folder, samples, result)
        except (OSError, RecordError) as error:
            log.error("evaluation %r: its completions cannot be stored: %s", eval_id, error)
        return result

    def _vote(self, made: EvaluationSet, samples: Sequence[EvalSample]) -> dict[str, Any]:
        """Return the fields of the majority vote; empty if there is none."""
        try:
            with AnswerComparer(self._config, made.verifier) as comparer:
                vote = majority_of(samples, comparer.same_of)
        except WaitTimeout as error:
            log.warning("evaluation of %r has no majority vote: %s", made.name, error)
            return {"majority": None, "majority_omitted": str(error)}
        return {} if vote is None else {"majority": vote}


class EvaluationRequests:
    """Requests evaluations from the manager and waits for them: for some alone, or while training
    continues.

    ``trainer_incarnation``: incarnation of this trainer. A request of one that was replaced
    raises Fenced.
    """

    def __init__(
        self,
        manager: ManagerClient,
        *,
        trainer_incarnation: str,
        config: Config,
        repair: Repair,
        writer: ResultWriter,
    ) -> None:
        """``repair``: called with the manager's status every few seconds while an evaluation is
        awaited.
        """
        self._manager = manager
        self._trainer_incarnation = trainer_incarnation
        self._seed = config.seed
        self._max_failed = config.evaluation.max_failed
        self._timeout_s = config.cluster.request_timeout_s
        self._repair = repair
        self._writer = writer
        self._status_read = time.monotonic()
        self._running: dict[str, _Requested] = {}  # eval_id -> evaluation
        self._progress: dict[str, tuple[int, ...]] = {}  # eval_id -> its last progress
        self._moved = time.monotonic()  # when one of them made progress
        self._writing: dict[str, asyncio.Task[dict[str, Any]]] = {}  # ended, and not stored yet

    async def start(
        self,
        eval_id: str,
        made: EvaluationSet,
        problems: int,
        step: int,
        *,
        requested_at: int | None = None,
        shown: str = "",
    ) -> None:
        """Request an evaluation of ``problems`` problems, due after ``step``; do not wait for it.

        ``requested_at``: the steps done, if the evaluation was due at an earlier ``step`` and is
        requested again. ``shown``: name in the step log, if it is not ``eval_id``.
        """
        request = EvaluateRequest(
            eval_id,
            made.split,
            problems,
            self._seed,
            self._trainer_incarnation,
            made.samples,
            made.name,
            self._max_failed,
        )
        await self._manager.evaluate(request)
        done = step if requested_at is None else requested_at
        self._running[eval_id] = _Requested(made, shown or eval_id, step, done, time.monotonic())

    async def run(self, eval_id: str, sets: Mapping[str, EvaluationSet], step: int) -> list[dict[str, Any]]:
        """Evaluate ``sets`` and wait for them; return their step-log records.

        Raises WaitTimeout with their progress.
        """
        requested = []
        for name, made in sets.items():
            shown = id_of_set(eval_id, name)
            # The manager answers a known id with its old result. A run that is continued has another
            # "after", so the id that the manager sees has the step in it.
            requested.append(id_of_set(f"{eval_id}-{step}", name))
            await self.start(requested[-1], made, made.problems, step, shown=shown)
        records = []
        while left := [name for name in requested if name in self._running]:
            records += await self.finished(*left)
            if any(name in self._running for name in left):
                await self._pause()
        return records

    async def finish_all(self) -> list[dict[str, Any]]:
        """Wait for all requested evaluations; return their records.

        Raises WaitTimeout with their progress.
        """
        records = []
        while self._running:
            records += await self.finished()
            if self._running:
                await self._pause()
        return records

    async def _pause(self) -> None:
        await asyncio.sleep(POLL_S)
        if time.monotonic() - self._status_read > STATUS_INTERVAL_S:
            self._status_read = time.monotonic()
            await self._repair(await self._manager.status())

    async def finished(self, *eval_ids: str) -> list[dict[str, Any]]:
        """Return the step-log records of those of ``eval_ids`` (default: all) that are done, each
        record once.

        Raises WaitTimeout if none of them has made progress for the time limit.
        """
        records, states = [], {}
        for eval_id in eval_ids or list(self._running):
            if eval_id not in self._writing:
                states[eval_id] = await self._manager.evaluation(eval_id)
            elif self._writing[eval_id].done():
                del self._running[eval_id]
                records.append(self._writing.pop(eval_id).result())
        now = time.monotonic()
        progress = {name: (state.restarts, state.done + state.failed, state.ended) for name, state in states.items()}
        if any(self._progress.get(name) != reached for name, reached in progress.items()):
            self._progress |= progress
            self._moved = now
        elif states and now - self._moved > self._timeout_s:
            parts = (f"{name!r} has {state.done} of {state.total} completions" for name, state in states.items())
            raise WaitTimeout(
                f"master_worker: evaluation {', '.join(parts)}, and no new one for {self._timeout_s:g} s "
                f"({sum(state.failed for state in states.values())} failed); see the logs of the rollout workers"
            )
        for eval_id, state in states.items():
            if state.ended:
                self._write(eval_id, self._running[eval_id], state)
        return records

    def _write(self, eval_id: str, running: _Requested, state: EvaluationReply) -> None:
        """Store an ended evaluation in a thread, while training continues."""
        if state.failed == state.total:
            log.error("evaluation %r: %s: see the logs of the rollout workers", eval_id, state.incomplete)
        # The step of the weights that sampled: when an evaluation is requested again, those of its
        # own step may be superseded.
        step = min(running.requested_at, max(running.step, state.version_min))
        seconds = time.monotonic() - running.started
        end = spans.now()
        begin = end - int(1e9 * seconds)
        spans.add("evaluate", begin, end, f"evaluation/{running.shown}", completions=state.total)
        result = record(running.shown, step, running.made, outcome_of(state), seconds)
        work = asyncio.to_thread(self._writer.write, eval_id, running.made, result, state)
        self._writing[eval_id] = asyncio.create_task(work, name=f"store {eval_id}")


def require_completions(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise StuckError if all completions of the held-out problems failed: a run would fare no better."""
    for made in records:
        if made["set"] == HELD_OUT and made["failed"] == made["problems"] * made["samples"]:
            raise StuckError(
                f"master_worker: evaluation {made['eval_id']!r}: {made['incomplete']}: "
                "see the logs of the rollout workers"
            )


def outcome_of(state: EvaluationReply) -> EvaluationOutcome:
    """Return what the statistics need of the manager's reply for an ended evaluation."""
    return EvaluationOutcome(
        tallies=[Tally(judged, right) for judged, right, count in state.tallies for _ in range(count)],
        incomplete=state.incomplete,
        failed=state.failed,
        total=state.total,
        reward_mean=state.reward_mean,
        length_mean=state.length_mean,
        version_min=state.version_min,
        version_max=state.version_max,
        metrics=state.metrics,
        restarts=state.restarts,
    )


# ---- evaluation run ----------------------------------------------------------------------------------------------
#
# One run of `realsys eval`: the model's files become a weight version, which the servers load and RolloutWorkers play.
#
# adopt the model ─> roll back (starts the ledger) ─> publish ─> evaluate ─> done


EVAL_ID = "eval"  # first part of the names of its evaluations


class EvaluationRun:
    """The phases of an evaluation without training."""

    def __init__(self, ctx: WorkerContext, manager: ManagerClient, step_log: StepLog) -> None:
        self._ctx = ctx
        self._manager = manager
        self._log = step_log
        self._status = RunStatus(ctx, step_log)
        self._timeout_s = ctx.config.cluster.request_timeout_s
        self._evaluations = EvaluationRequests(
            manager,
            trainer_incarnation=ctx.incarnation,
            config=ctx.config,
            repair=self.check_weights,
            writer=ResultWriter(ctx.config, ctx.paths.evaluations),
        )

    async def run(self) -> None:
        """Evaluate, and write the results to the step log. Raises RealsysError."""
        await self._status.enter("load")
        published = await on_disk(f"reading {self._model}", self._timeout_s, self._adopt)
        await self._manager.roll_back(RollBackRequest(NOTHING, NOTHING, self._ctx.incarnation))
        ctx = self._ctx
        key = VersionKey(ctx.store, ctx.names.model_version(), ctx.config.cluster.lease_s, ctx.check_alive)
        await key.set(published)
        self._published = published
        await self._status.enter("evaluate")
        sets = {name: made for name, made in evaluation_sets(self._ctx.config).items() if made.problems}
        for entry in await self._evaluations.run(EVAL_ID, sets, published.step):
            self._log.append(entry)
        await self._status.enter("done")

    @property
    def _model(self) -> Path:
        return self._ctx.paths.base_model(self._ctx.config)

    def _adopt(self) -> PublishedVersion:
        ctx, step = self._ctx, step_of(self._model)
        folder = adopt(self._model, ctx.paths.weights(), step, ctx.incarnation, check_alive=ctx.check_alive)
        return PublishedVersion(step, ctx.incarnation, str(folder), step, ctx.config.weights.transport)

    async def check_weights(self, status: Mapping[str, Any]) -> None:
        """End the run if no server can load the weights because the model was changed. Raises WeightsError."""
        published = self._published
        if unserved(status, published.version):
            folder = Path(published.locator)
            try:
                await on_disk(f"verifying {folder}", self._timeout_s, lambda: verify(folder, published.version))
            except WeightsError as error:
                raise WeightsError(f"{self._model} has changed since the start: {error}") from None

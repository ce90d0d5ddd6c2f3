"""One run of `realsys eval`: the model's files become a weight version, which the servers load and RolloutWorkers play.

adopt the model ─> roll back (starts the ledger) ─> publish ─> evaluate ─> done
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realsys.cluster.aio import on_disk
from realsys.cluster.worker import WorkerContext
from realsys.config.evaluation_sets import evaluation_sets
from realsys.errors import WeightsError
from realsys.manager.client import ManagerClient
from realsys.manager.messages import RollBackRequest
from realsys.train.master.publish import VersionKey, unserved
from realsys.train.master.recovery import NOTHING
from realsys.train.master.request_evaluations import EvaluationRequests, ResultWriter
from realsys.train.master.step_statistics import RunStatus, StepLog
from realsys.types import PublishedVersion
from realsys.weights.disk.plain_folders import adopt, step_of, verify

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
        await self._publish(published)
        await self._status.enter("evaluate")
        sets = {name: made for name, made in evaluation_sets(self._ctx.config).items() if made.problems}
        for record in await self._evaluations.run(EVAL_ID, sets, published.step):
            self._log.append(record)
        await self._status.enter("done")

    @property
    def _model(self) -> Path:
        return self._ctx.paths.base_model(self._ctx.config)

    def _adopt(self) -> PublishedVersion:
        ctx, step = self._ctx, step_of(self._model)
        folder = adopt(self._model, ctx.paths.weights(), step, ctx.incarnation, check_alive=ctx.check_alive)
        return PublishedVersion(step, ctx.incarnation, str(folder), step, ctx.config.weights.transport)

    async def _publish(self, published: PublishedVersion) -> None:
        ctx = self._ctx
        key = VersionKey(ctx.store, ctx.names.model_version(), ctx.config.cluster.lease_s, ctx.check_alive)
        await key.set(published)
        self._published = published

    async def check_weights(self, status: Mapping[str, Any]) -> None:
        """End the run if no server can load the weights because the model was changed. Raises WeightsError."""
        published = self._published
        if unserved(status, published.version):
            folder = Path(published.locator)
            try:
                await on_disk(f"verifying {folder}", self._timeout_s, lambda: verify(folder, published.version))
            except WeightsError as error:
                raise WeightsError(f"{self._model} has changed since the start: {error}") from None

"""The MasterWorker's step loop.

    connect ──> warm-up (sft) ──> publish v0 ──> evaluate "before" ──┐
        ┌────────────────────────────────────────────────────────────┘
        └─> batch ──> plan ──> graph of calls ──> clear ──> save ──> publish v ──> tell manager ──> checkpoint ─┐
             ^                                                                                                  │
             └──────────────── until steps, epochs or time are used up ─────────────────────────────────────────┘
        ──> evaluate "after" ──> export the last version

Consumes batches of groups' metadata (``intake``); waits for the next batch and for the replies to calls; produces
weight versions, checkpoints and the step log. Never sees a token. Told to stop, it waits for no batch, ends the step
under way, and has what was trained last saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from realsys.cluster.aio import run_beside, unless
from realsys.cluster.failpoint import failpoint
from realsys.config.schema import Config
from realsys.manager.messages import TrainedRequest
from realsys.master.calls.call_arguments import CallArguments
from realsys.master.evaluation import Evaluations
from realsys.master.intake import Intake, Taken
from realsys.master.publish import Publisher
from realsys.master.records.agreement import AgreementMonitor
from realsys.master.recovery import eval_id_of
from realsys.master.statistics import batch_statistics, call_seconds, episodes_of, train_record
from realsys.master.step import StepRunner
from realsys.master.step_log import StepLog
from realsys.rollout.manager_client import ManagerClient

#: what the manager's status page shows of the last step
SHOWN = ("step", "seconds", "train_tokens_per_s", "consumed_tokens_per_s", "accuracy", "agreement")


class Checkpointer(Protocol):
    """Training state on disk. Called between two steps, while no call runs."""

    async def after_step(self, step: int) -> None:
        """``step`` is trained, published and told to the manager."""
        ...

    async def finish(self, *, stopped: bool) -> None:
        """No further step comes, because all are done or because the run is ``stopped``; returns when everything is
        on disk."""
        ...


class TrainLoop:
    """Asynchronous training: takes groups as they arrive, has ``runner`` train them, publishes, reports."""

    def __init__(
        self,
        config: Config,
        *,
        runner: StepRunner,
        intake: Intake,
        arguments: CallArguments,
        publisher: Publisher,
        manager: ManagerClient,
        evaluations: Evaluations,
        checkpoints: Checkpointer,
        step_log: StepLog,
        show: Callable[[dict[str, Any]], Awaitable[None]],
        hf_folder: Path,
        total_steps: int,
        stop: asyncio.Event,
    ) -> None:
        self._config, self._runner, self._intake, self._stop = config, runner, intake, stop
        self._arguments, self._publisher, self._manager, self._log = arguments, publisher, manager, step_log
        self._evaluations, self._checkpoints, self._show = evaluations, checkpoints, show
        self._hf_folder, self._total_steps = hf_folder, total_steps
        self._agreement = AgreementMonitor(config.agreement)
        self._started = time.monotonic()

    async def run(self, done: int = 0) -> int:
        """Train on from step ``done`` until a stop condition holds or ``stop`` is set; returns the steps done.

        Raises Fenced when another training side has taken over.
        """
        if recorder := self._runner.recorder:
            await recorder.rewind(done)
        return await run_beside(self._steps(done), self._intake.give_back())

    async def _steps(self, step: int) -> int:
        while step < self._total_steps and not self._out_of_time():
            if not await self.step(step + 1):
                break
            step += 1
            if self.evaluation_is_due(step):
                await self.start_evaluation(step)
            for record in await self._evaluations.finished():
                self._log.append(record)
        await self._checkpoints.finish(stopped=self._stop.is_set())
        if recorder := self._runner.recorder:
            await recorder.finish()
        return step

    def evaluation_is_due(self, step: int) -> bool:
        """Beside training, after ``step``."""
        every = self._config.evaluation.every_steps
        return every > 0 and step % every == 0 and 0 < step < self._total_steps

    async def start_evaluation(self, step: int, asked_at: int | None = None) -> None:
        """That of ``step``, beside training; ``asked_at``: the step done, where it is asked for again."""
        await self._evaluations.start(eval_id_of(step), self._config.evaluation.every_problems, step, asked_at)

    async def step(self, step: int) -> bool:
        """One train step: version ``step - 1`` trains and becomes version ``step``. False: told to stop before it."""
        watch = _Watch()
        taken = await unless(self._stop, self._intake.next_batch(step - 1))
        if taken is None:
            return False
        seconds = {"wait": watch.lap()}
        failpoint("master.batch", at=step)
        args = self._arguments.of_step(step)
        results = await self._runner.run(step, taken.groups, args)
        self._arguments.observe(results, len(episodes_of(taken.samples)))
        seconds |= call_seconds(results, [call.name for call in self._runner.flow.calls if call.trains])
        times = await self._publisher.publish(step, step)
        watch.lap()
        failpoint("master.trained", at=step)
        statistics = await self._tell_manager(step, taken)
        seconds |= {"save": times["save"], "publish": times["publish"] + watch.lap()}
        await self._keep(step)
        seconds |= {"checkpoint": watch.lap(), "total": watch.total()}
        record = {
            "step": step,
            "total": self._total_steps,
            "version": step,
            "lr": args["actor_train"]["lr"] if "actor_train" in results else 0.0,
            "dropped_stale": taken.dropped_stale,
            "dropped_filtered": taken.dropped_filtered,
            "refused": taken.refused,
            "tickets": taken.tickets,
            "agreement": self._agreement.observe(
                step - 1, results["actor_inf"].stats if "actor_inf" in results else {}
            ),
            **train_record(statistics, seconds, results),
        }
        self._log.append({"kind": "train", "time": time.time(), **record})
        await self._show({key: record[key] for key in SHOWN})
        return True

    async def _tell_manager(self, step: int, taken: Taken) -> dict[str, Any]:
        """Which tickets are in version ``step``; returns the statistics of the batch."""
        statistics = batch_statistics(taken.samples, version=step - 1)
        await self._manager.trained(
            TrainedRequest(
                step=step,
                version=step,
                trained=taken.tickets,
                oldest=taken.oldest,
                staleness=statistics["staleness"]["histogram"],
                incarnation=self._intake.trainer_incarnation,
                held=self._intake.held(),
            )
        )
        return statistics

    async def _keep(self, step: int) -> None:
        """What stays on disk beyond the served versions. After the manager knows: a checkpoint of ``step`` says that
        its tickets are trained, so the ledger must not give them out again.
        """
        every = self._config.checkpoint.hf_every_steps
        if every and step % every == 0:
            await self._publisher.export(self._hf_folder / f"step-{step}")
        await self._checkpoints.after_step(step)

    def _out_of_time(self) -> bool:
        limit = self._config.train.max_seconds
        return bool(limit) and time.monotonic() - self._started > limit


class _Watch:
    """Seconds since the start, and since the last lap."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def total(self) -> float:
        return time.perf_counter() - self._began


def planned_steps(config: Config, train_prompts: int) -> int:
    """Train steps that the stop conditions `total_steps` and `total_epochs` allow. At least 1."""
    steps = config.train.total_steps
    if config.train.total_epochs:
        steps = min(steps, max(1, config.train.total_epochs * train_prompts // config.train.batch_groups))
    return steps

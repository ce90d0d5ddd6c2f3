"""The MasterWorker's step loop. The phases around it are in ``realsys.train.master.run``.

    connect ──> warm-up (sft) ──> publish v0 ──> evaluate "before" ──┐
        ┌────────────────────────────────────────────────────────────┘
        └─> batch ──> plan ──> graph of calls ──> clear ──> copy weights ──> report ──> checkpoint ─┐
             ^                                                   └──> write and publish v           │
             └──────────────── until steps, epochs or time are used up ─────────────────────────────┘
        ──> evaluate "after" ──> export the last version

A version is written and published while the next step runs (``realsys.train.master.publish``). Waits for its end:
the publication of the next version, an export, an evaluation, the end of the run. So a checkpoint becomes
complete only after its version was published. With eta = 0 the manager grants the tickets of the next batch
after the publication, so the next step begins after it.

Consumes batches of groups' metadata (``intake``); waits for the next batch and for the replies to
calls; produces weight versions, checkpoints and the step log. It never sees a token. When it is
asked to stop, it waits for no further batch, abandons the current step (``stopping``), and saves
the last trained version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from realsys.algorithm.token_losses import StepLosses
from realsys.cluster.aio import run_beside, unless
from realsys.cluster.failpoint import failpoint
from realsys.config.evaluation_sets import evaluation_sets, id_of_set, set_of_id
from realsys.config.schema import Config
from realsys.errors import PromptsUsedUp
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.tickets import ticket_ranges
from realsys.manager.messages import ClaimRequest, TrainedRequest
from realsys.observe import spans
from realsys.observe.signal import DriftWatch, SignalWatch
from realsys.observe.spans import span
from realsys.observe.step_log import USED_UP
from realsys.train.master.devices import Devices
from realsys.train.master.executor import CallResult
from realsys.train.master.intake_decisions import IntakeState, TrainBatch
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.publish import Publisher
from realsys.train.master.recorder import check_finite
from realsys.train.master.recovery import due_sets, eval_id_of
from realsys.train.master.request_evaluations import EvaluationRequests, Repair
from realsys.train.master.step import CallArguments, StepRunner
from realsys.train.master.step_statistics import (
    AgreementMonitor,
    Increase,
    StepLog,
    batch_statistics,
    call_seconds,
    episodes_of,
    train_record,
    untrained_shares,
)
from realsys.train.master.stopping import Stopping
from realsys.types import SampleMeta

log = logging.getLogger(__name__)

#: fields of the last step's record that the manager's status page shows
STATUS_FIELDS = (
    *("step", "seconds", "train_tokens_per_s", "consumed_tokens_per_s", "accuracy", "agreement"),
    *("untrained", "too_old", "length_ks", "gpu", "kept_keys_fraction"),
)


#: behaviour weight above which a step warns; a cap of 5 hides it from the loss
LARGE_WEIGHT = 100.0


class Onset:
    """Tells when a condition begins to hold."""

    def __init__(self) -> None:
        self._held = False

    def begins(self, holds: bool) -> bool:
        """Return True if the condition holds and did not hold at the last call."""
        before, self._held = self._held, holds
        return holds and not before


class Checkpointer(Protocol):
    """Owner of the training state on disk. It is called between two steps, while no call runs."""

    async def after_step(self, step: int) -> None:
        """Save the state if it is due.

        ``step`` is trained and reported to the manager, and its publication has begun.
        """
        ...

    async def finish(self, *, stopped: bool) -> None:
        """Save the state if it is due, and wait until all saves are on disk. No step follows.

        ``stopped``: the run was stopped; otherwise all its steps are done.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainLoopParts:
    """The collaborators of a TrainLoop.

    ``show`` puts fields of the last step on the manager's status page.
    """

    runner: StepRunner
    stopping: Stopping
    intake: Intake
    arguments: CallArguments
    publisher: Publisher
    manager: ManagerClient
    evaluations: EvaluationRequests
    checkpoints: Checkpointer
    step_log: StepLog
    show: Callable[[dict[str, Any]], Awaitable[None]]
    devices: Devices


class TrainLoop:
    """Asynchronous training: takes groups as they arrive, trains on them, publishes the weights,
    reports.
    """

    def __init__(
        self,
        config: Config,
        parts: TrainLoopParts,
        *,
        hf_folder: Path,
        total_steps: int,
        stop: asyncio.Event,
    ) -> None:
        """``hf_folder``: for the exports of ``checkpoint.hf_every_steps``; ``stop`` ends the loop
        after its step.
        """
        self._config = config
        self._parts = parts
        self._hf_folder = hf_folder
        self._total_steps = total_steps
        self._stop = stop
        self._agreement = AgreementMonitor(config.train.engine_check)
        self._started = time.monotonic()
        self._first_step = 1
        self._increases = _Increases()
        self._waste, self._large_weights = Onset(), Onset()
        self._sets = evaluation_sets(config)
        self._signal, self._drift = SignalWatch(config.train.ppo.advantage.mean), DriftWatch()

    async def run(self, done: int = 0) -> int:
        """Train from step ``done`` until a stop condition holds or ``stop`` is set; return the
        steps done.

        Raises Fenced when another trainer has taken over.
        """
        if recorder := self._parts.runner.recorder:
            await recorder.rewind(done)
        self._first_step = done + 1
        if done:
            self._increases = _Increases(known=False)
        work = run_beside(self._steps(done), self._parts.intake.report_drops())
        return await run_beside(work, self._parts.publisher.watch())

    async def _steps(self, step: int) -> int:
        while step < self._total_steps and not self._out_of_time():
            if not await self.step(step + 1):
                break
            step += 1
            if due := due_sets(self._sets, step, self._total_steps):
                await self._parts.publisher.finish()  # the manager evaluates the newest published version
                for name in due:
                    await self.start_evaluation(id_of_set(eval_id_of(step), name), step)
            for record in await self._parts.evaluations.finished():
                self._parts.step_log.append(record)
        await self._parts.publisher.finish()
        await self._parts.devices.take(batch=False)
        await self._parts.checkpoints.finish(stopped=self._stop.is_set())
        if recorder := self._parts.runner.recorder:
            await recorder.finish()
        return step

    async def start_evaluation(self, eval_id: str, step: int, requested_at: int | None = None) -> None:
        """Request an evaluation that is due after ``step``; training continues while it runs.

        ``requested_at``: the steps done, if a recovery requests the evaluation again.
        """
        made = self._sets[set_of_id(eval_id)]
        await self._parts.evaluations.start(eval_id, made, made.every_problems, step, requested_at=requested_at)

    async def step(self, step: int) -> bool:
        """Run one train step: version ``step - 1`` trains and becomes version ``step``.

        Returns False if ``stop`` was set while it waited for a batch, if the step was abandoned, or if the prompts are
        used up: filters and failures may take so many that the planned steps cannot all be trained.
        """
        parts, watch, begin = self._parts, _Watch(), spans.now()
        if parts.devices.shared and not parts.intake.state.has_batch:
            await parts.publisher.finish()  # the servers wake with this version
            await parts.devices.give_back()
        try:
            with span("wait", f"step/{step}"):
                batch = await unless(self._stop, parts.intake.next_batch(step - 1))
        except PromptsUsedUp as end:
            log.warning("training ends after step %d of %d: %s", step - 1, self._total_steps, end)
            parts.step_log.append({"kind": USED_UP, "step": step, "reason": str(end)})
            return False
        if batch is None:
            return False
        seconds = {"wait": watch.lap()}
        failpoint("master.batch", at=step)
        if not await unless(self._stop, parts.devices.take(f"step/{step}")):
            return False
        if parts.devices.shared:
            seconds["switch"] = watch.lap()
        args = parts.arguments.of_step(step)
        results = await parts.stopping.run(step, parts.runner.run(step, batch.groups, args))
        if results is None:
            return False
        recorder = parts.runner.recorder
        await check_finite(results, recorder, step)
        parts.arguments.observe(results, len(episodes_of(batch.samples)))
        seconds |= call_seconds(results, [call.name for call in parts.runner.flow.calls if call.trains])
        times = await parts.publisher.begin(step, step, recorder.saved if recorder else None)
        watch.lap()
        failpoint("master.trained", at=step)
        with span("report", f"step/{step}"):
            statistics = await self._report_trained(step, batch)
        seconds |= {"save": times["save"], "publish": times["publish"] + watch.lap()}
        with span("save", f"step/{step}"):
            # The manager must know of the step before: a checkpoint says that its tickets are trained, so after a
            # recovery from it the ledger must not issue them again.
            every = self._config.checkpoint.hf_every_steps
            if every and step % every == 0:
                await self._parts.publisher.export(self._hf_folder / f"step-{step}")
            await self._parts.checkpoints.after_step(step)
        seconds |= {"checkpoint": watch.lap(), "total": watch.total()}
        record = self._record(step, batch, args, results) | train_record(statistics, seconds, results)
        parts.step_log.append({"kind": "train", "time": time.time(), **record})
        spans.add("step", begin, spans.now(), f"step/{step}", tickets=ticket_ranges(batch.tickets))
        if warning := self._signal.observe(record):
            log.warning("%s", warning)
        for warning in self._drift.observe(record):
            log.warning("%s", warning)
        await parts.show({key: record[key] for key in STATUS_FIELDS if key in record})
        return True

    def _record(
        self,
        step: int,
        batch: TrainBatch,
        args: Mapping[str, Mapping[str, Any]],
        results: Mapping[str, CallResult],
    ) -> dict[str, Any]:
        """Return the fields of the step log that neither the batch's metadata nor the calls report."""
        trained = results["actor_train"].stats if "actor_train" in results else {}
        comparison = results["actor_inf"].stats if "actor_inf" in results else trained
        masks_truncated = self._config.train.ppo.truncated_answers == "mask"
        self._warn_of_waste(batch.losses)
        self._warn_of_weights(step, trained)
        return {
            "step": step,
            "total": self._total_steps,
            "version": step,
            "lr": args["actor_train"]["lr"] if "actor_train" in results else 0.0,
            "dropped_stale": batch.dropped_stale,
            "refused": batch.refused,
            "untrained": untrained_shares(batch.losses, batch.samples, trained, masks_truncated=masks_truncated),
            "sampled_tokens": batch.losses.tokens,
            "too_old": batch.losses.too_old,
            "length_ks": batch.losses.length_ks,
            **({"length_biased": True} if self._is_length_biased(step) else {}),
            "tickets": batch.tickets,
            "agreement": self._agreement.observe(step - 1, comparison),
        }

    def _is_length_biased(self, step: int) -> bool:
        """Return True if the lengths in the batch of ``step`` are not those of the policy.

        The tickets of eta + 1 batches start together, so the first batches get the shortest completions.
        The last batch gets all that were still running, which are the longest.
        """
        eta = self._config.asynchronous.max_staleness
        return step == self._total_steps or (eta > 0 and step - self._first_step <= eta)

    def _warn_of_waste(self, losses: StepLosses) -> None:
        """Warn once when staleness begins to cost many tokens, and again if it does so later."""
        if self._waste.begins(losses.warning):
            log.warning(
                "%.0f %% of the tokens sampled for the last steps were too old to be trained: increase "
                "asynchronous.max_staleness, or set asynchronous.stale_policy=train",
                100 * losses.too_old,
            )

    def _warn_of_weights(self, step: int, stats: Mapping[str, float]) -> None:
        """Warn once when behaviour weights become very large."""
        largest = stats.get("w_max", 0.0)
        if self._large_weights.begins(largest > LARGE_WEIGHT):
            log.warning(
                "step %d has a token with behaviour weight w = %.3g: the trainer's log-prob and the one recorded in "
                "generation are far apart; see agreement in the step log, and lower "
                "asynchronous.max_staleness if that is small",
                step,
                largest,
            )

    async def _report_trained(self, step: int, batch: TrainBatch) -> dict[str, Any]:
        """Report to the manager which tickets version ``step`` contains; return the statistics of
        the batch.
        """
        intake = self._parts.intake.state
        statistics = batch_statistics(batch.samples, version=step - 1)
        reply = await self._parts.manager.trained(
            TrainedRequest(
                step=step,
                version=step,
                trained=batch.tickets,
                oldest=batch.oldest,
                staleness=statistics["staleness"]["histogram"],
                incarnation=intake.trainer_incarnation,
                held=intake.held(),
            )
        )
        self._parts.publisher.keep(reply.in_use)
        increases = self._increases
        intake.observe_lost(increases.tokens.of(reply.lost_tokens), increases.lengths.of(reply.lost_lengths))
        return statistics | {
            "verdict_failures": dict(increases.failures.of(reply.verdict_failures)),
            "dropped_filtered": increases.filtered.of(reply.filtered).total(),
            "memory": reply.memory,
        }

    def _out_of_time(self) -> bool:
        limit = self._config.train.max_seconds
        return bool(limit) and time.monotonic() - self._started > limit


class _Increases:
    """Increases of the manager's counts from step to step. ``known`` False: it counted before this trainer started."""

    def __init__(self, *, known: bool = True) -> None:
        self.tokens = Increase(known=known)
        self.lengths = Increase(known=known)
        self.failures = Increase(known=known)
        self.filtered = Increase(known=known)


class _Watch:
    """A stop watch: seconds since its start, and since the last lap."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._last = self._began

    def lap(self) -> float:
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds

    def total(self) -> float:
        return time.perf_counter() - self._began


def planned_steps(config: Config, train_prompts: int) -> int:
    """Return the train steps that ``train.total_steps`` and ``train.total_epochs`` allow, at least
    1.
    """
    steps = config.train.total_steps
    if config.train.total_epochs:
        steps = min(steps, max(1, config.train.total_epochs * train_prompts // config.train.batch_groups))
    return steps


# ---- the shell of the intake: carries the decisions of ``IntakeState`` to the manager and to the workers
#
#     notices ──on_samples──> IntakeState ──next_batch──> claimed at the manager ──> groups of one step
#                                  └──report_drops──> reported to the manager, which reissues or replaces them; freed
#
# Consumes the notices of the DP heads. ``next_batch`` waits for the groups of a batch; each arrival
# unblocks it. ``report_drops`` runs while the steps run, so a group that is dropped on arrival frees
# its quota before the step ends.


_STATUS_INTERVAL_S = 5.0  # between two reads of the manager's status while no group arrives


class Intake:
    """The groups between the stream and the steps. ``state`` decides about them."""

    def __init__(self, state: IntakeState, workers: ModelWorkers, manager: ManagerClient, repair: Repair) -> None:
        """``repair``: called with the manager's status while no group arrives."""
        self.state = state
        self._workers = workers
        self._manager = manager
        self._repair = repair
        self._arrived = asyncio.Event()
        self._work_left = asyncio.Event()  # wakes report_drops

    def on_samples(self, samples: Sequence[SampleMeta]) -> None:
        """Take the samples of a notice `samples_arrived`."""
        self.state.add(samples)
        if self.state.departures:
            self._work_left.set()
        self._arrived.set()

    async def report_drops(self) -> None:
        """Report and free the groups that were dropped on arrival, until cancelled."""
        while True:
            await self._work_left.wait()
            self._work_left.clear()
            await self._carry_out()

    async def next_batch(self, version: int) -> TrainBatch:
        """Wait for the groups of a batch to train on top of ``version``, and claim them.

        Raises StuckError when no further batch can come, PromptsUsedUp if that is the end of the epochs, and
        WaitTimeout with the manager's state when no group arrives for ``cluster.request_timeout_s``.
        """
        while True:
            # Cleared before the buffer is read: a group that arrives in between must not go
            # unnoticed.
            self._arrived.clear()
            tickets = self.state.propose(version)
            await self._carry_out()
            if not tickets:
                await self._next_group()
                continue
            request = ClaimRequest(version + 1, tickets, self.state.trainer_incarnation)
            batch = self.state.conclude((await self._manager.claim(request)).gone)
            await self._carry_out()
            if batch is not None:
                if batch.masked:
                    assert batch.oldest_trained is not None, "tokens are masked under policies mask and drop only"
                    await self._workers.mask(_by_owner(batch.masked), batch.oldest_trained)
                return batch

    async def _next_group(self) -> None:
        """Wait until samples arrive.

        Every few seconds check that some still can. Raises PromptsUsedUp, StuckError, WaitTimeout.
        """
        self.state.begin_wait(time.monotonic())
        while not await self._arrival(min(_STATUS_INTERVAL_S, self.state.settings.timeout_s)):
            # The manager counts a group that was lost in transit as finished, so it grants no
            # other. Only this report shows the loss.
            if lost := (await self._manager.trained(self._request(held=self.state.held()))).lost:
                log.warning("%d groups never arrived and are reissued: %s", len(lost), ", ".join(lost[:20]))
            status = await self._manager.status()
            await self._repair(status)
            self.state.check_wait(status, time.monotonic())

    async def _arrival(self, timeout_s: float) -> bool:
        """Return True if samples arrive within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def _carry_out(self) -> None:
        """Report the groups that will not be trained, and free their samples on the workers that received them."""
        # Taken out before the first await: on_samples may append while a report is on its way.
        departures = self.state.depart()
        if departures.dropped or departures.stale:
            await self._manager.trained(self._request(dropped=departures.dropped, stale=departures.stale))
            self.state.reported(departures)
        if departures.free:
            # Sent in this order, and workers serve requests in order: a group is kept before it is cleared.
            kept = [self._workers.keep_dropped(departures.kept)] if departures.kept else []
            await asyncio.gather(*kept, self._workers.clear(_by_owner(departures.free)))

    def _request(self, **fields: Any) -> TrainedRequest:
        version = self.state.version
        return TrainedRequest(version, version, incarnation=self.state.trainer_incarnation, **fields)


def _by_owner(samples: Sequence[SampleMeta]) -> dict[int, list[str]]:
    """Return worker -> ids of the samples that it holds, sorted by worker."""
    ids: dict[int, list[str]] = {}
    for sample in samples:
        ids.setdefault(sample.owner, []).append(sample.sample_id)
    return dict(sorted(ids.items()))

"""The training loop's calls, as the MasterWorker carries them out. The loop itself is a script (``realsys.loops``).

    next_step ──> prepare ──────> call, update ──────────> publish ──────────────────────────────> next_step
                    groups within     models compute on        weights are copied, tickets reported,
                    the staleness     the arrays of the        a due checkpoint is taken; the version
                    bound, claimed    batch, and train         is written while the next step trains

A step is what happens from one publication to the next: version ``step - 1`` trains and becomes version ``step``. A
version is written and published while the next step runs (``realsys.train.master.publish``). Waits for its end: the
publication of the next version, an export, an evaluation, the end of the run. So a checkpoint becomes complete only
after its version was published. With eta = 0 the manager grants the tickets of the next batch after the publication, so
the next step begins after it.

The script has metadata only, and never sees a token unless it asks for it (``rows``). When the run is asked to stop, a
step that has updated weights goes on to its publication; any other call raises Stopped. The last version is saved.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from realsys.cluster.aio import first_completed, on_disk, run_beside, unless
from realsys.cluster.failpoint import failpoint
from realsys.config.allocation import ACTOR, has_servers
from realsys.config.dataflow import Dataflow, script_call
from realsys.config.doors import LOSS
from realsys.config.evaluation_sets import evaluation_sets, id_of_set, set_of_id
from realsys.config.schema import Config
from realsys.data.submitted import SubmittedWriter
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError, PromptsUsedUp, StaleBatch, Stopped, StreamError, TooFewGroups
from realsys.manager.client import ManagerClient
from realsys.manager.ledger.tickets import ticket_ranges
from realsys.manager.messages import MAX_TICKETS, PinRequest, SubmitRequest, TrainedRequest
from realsys.model_calls import MEASURE, PPO, ReadRequest
from realsys.observe import spans
from realsys.observe.signal import DriftWatch, SignalWatch
from realsys.observe.spans import span
from realsys.observe.step_log import USED_UP
from realsys.session import BatchInfo, RowArrays, ScriptCall, Submitted
from realsys.train.master.devices import Devices
from realsys.train.master.executor import CallResult
from realsys.train.master.intake import Intake
from realsys.train.master.intake_decisions import TrainBatch
from realsys.train.master.learned_rows import LearnedRows
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.publish import Publisher
from realsys.train.master.recorder import check_finite
from realsys.train.master.recovery import due_sets, eval_id_of
from realsys.train.master.request_evaluations import EvaluationRequests
from realsys.train.master.step import CallArguments, HeldBatch, StepRunner
from realsys.train.master.step_record import Increases, StepWarnings, joined, row_record
from realsys.train.master.step_statistics import (
    AgreementMonitor,
    StepLog,
    batch_statistics,
    call_seconds,
    episodes_of,
    row_statistics,
    train_record,
    untrained_shares,
)
from realsys.train.master.stopping import Stopping
from realsys.types import ARRAY_KEYS, SampleMeta

log = logging.getLogger(__name__)

Result = TypeVar("Result")
#: fields of the last step's record that the manager's status page shows
STATUS_FIELDS = (
    *("step", "seconds", "train_tokens_per_s", "consumed_tokens_per_s", "accuracy", "agreement"),
    *("untrained", "too_old", "length_ks", "gpu", "kept_keys_fraction"),
)
#: wait for a script that is to stop, after its last call; then the run is saved and ends without it
_LAST_CALL_S = 2.0
#: errors of calls after which a script may go on
OF_THE_SCRIPT = (ConfigError, DataError, StaleBatch, Stopped, TooFewGroups)


class Checkpointer(Protocol):
    """Owner of the training state on disk. It is called between two steps, while no call runs."""

    async def after_step(self, step: int) -> None:
        """Save the state if it is due.

        ``step`` is trained and reported to the manager, and its publication has begun.
        """
        ...

    async def save(self) -> None:
        """Save the state of the last step, which is published, and wait until it is on disk."""
        ...

    async def finish(self, *, stopped: bool) -> None:
        """Save the state if it is due, and wait until all saves are on disk. No step follows.

        ``stopped``: the run was stopped; otherwise all its steps are done.
        """
        ...


@dataclass(frozen=True, slots=True)
class SessionParts:
    """The collaborators of a MasterSession.

    ``show`` puts fields of the last step on the manager's status page. ``open_submitted`` opens the file of the rows
    that the script submits. ``rows``: the batches of a supervised run; None: agents make them.
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
    workers: ModelWorkers
    tokenizer: TextTokenizer
    open_submitted: Callable[[], SubmittedWriter]
    rows: LearnedRows | None = None


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


@dataclass(slots=True)
class _Held:
    """A batch of the script. ``source``: as it was claimed; parts of it share that."""

    batch: HeldBatch
    source: TrainBatch
    whole: HeldBatch
    claimed: int  # steps done then


@dataclass(slots=True)
class _Step:
    """What the script has done in a step so far."""

    number: int
    watch: _Watch = field(default_factory=_Watch)
    begin: int = field(default_factory=spans.now)
    seconds: dict[str, float] = field(default_factory=lambda: {"wait": 0.0})
    prepared: bool = False  # a supervised run has one batch a step
    args: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, CallResult] = field(default_factory=dict)
    training: set[str] = field(default_factory=set)  # names of the calls that have trained
    trained: list[int] = field(default_factory=list)  # numbers of the batches
    fields: dict[str, float] = field(default_factory=dict)  # of the script, for the record


class MasterSession:
    """The calls of a training script, and the state that they share. ``run`` runs a script."""

    def __init__(
        self,
        config: Config,
        parts: SessionParts,
        *,
        hf_folder: Path,
        total_steps: int,
        stop: asyncio.Event,
    ) -> None:
        """``hf_folder``: for the exports of ``checkpoint.hf_every_steps``; ``stop`` ends the script
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
        self._increases = Increases()
        self._warnings = StepWarnings()
        self._sets = evaluation_sets(config)
        self._signal, self._drift = SignalWatch(config.train.ppo.advantage.mean), DriftWatch()
        self._done = 0  # steps
        self._step = _Step(1)
        self._used_up = False
        self._batches: dict[int, _Held] = {}
        self._last_batch = time.time_ns()  # a batch of a trainer before this one has no number of this one
        self._calling = 0  # calls of the script that are carried out now
        self._failed: asyncio.Future[None] | None = None  # by an error of a call that is no mistake of the script
        self._over = False
        self._submitting = asyncio.Lock()
        self._submitted: SubmittedWriter | None = None
        self._timeout_s = config.cluster.request_timeout_s
        trains_actor = [call.name for call in parts.runner.flow.calls if call.trains and call.role == ACTOR]
        self._main = trains_actor[-1] if parts.rows is not None and trains_actor else "actor_train"

    async def run(self, script: Callable[[], Awaitable[object]], done: int = 0) -> int:
        """Run ``script`` from step ``done`` to its end, or until ``stop`` is set; return the steps done.

        Raises what the script raises, and Fenced when another trainer has taken over.
        """
        if recorder := self._parts.runner.recorder:
            await recorder.rewind(done)
        self._first_step, self._done = done + 1, done
        self._step = _Step(done + 1)
        if done:
            self._increases = Increases(known=False)
        try:
            work = run_beside(self._run(script), self._parts.intake.report_drops())
            return await run_beside(work, self._parts.publisher.watch())
        finally:
            self._over = True
            if self._parts.rows is not None:
                await self._parts.rows.close()
            if self._submitted is not None:
                self._submitted.close()

    async def _run(self, script: Callable[[], Awaitable[object]]) -> int:
        try:
            await self._until_over(script())
        except Stopped:
            if not self._stop.is_set():
                raise
        if self._step.training:
            await self.publish()  # without it the last checkpoint would not have the weights of its step
        await self._parts.publisher.finish()
        await self._parts.devices.take(batch=False)
        await self._parts.checkpoints.finish(stopped=self._stop.is_set())
        if recorder := self._parts.runner.recorder:
            await recorder.finish()
        return self._done

    async def _until_over(self, script: Awaitable[object]) -> None:
        """Wait for the end of the script, or after the request to stop until it has made no call for a while."""
        self._failed = asyncio.get_running_loop().create_future()
        running: asyncio.Future[Any] = asyncio.ensure_future(script)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [running, self._failed]
            await first_completed([*ends, stop])
            while not any(end.done() for end in ends):
                await asyncio.wait(ends, timeout=_LAST_CALL_S, return_when=asyncio.FIRST_COMPLETED)
                if not running.done() and not self._calling:
                    log.warning("the training script does not end: it has made no call for %g s", _LAST_CALL_S)
                    return
            for end in reversed(ends):
                if end.done():
                    end.result()
        finally:
            for future in (running, stop, self._failed):
                future.cancel()
            await asyncio.wait({running, stop})

    def perform(self, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Return the work of a call of the script, by its name. Raises Stopped when the run has ended."""
        if self._over:
            raise Stopped(f"the run has ended after step {self._done}")
        return self._counted(getattr(self, method)(*args))

    async def _counted(self, work: Coroutine[Any, Any, Any]) -> Any:
        self._calling += 1
        try:
            return await work
        except Exception as error:
            # Whatever the script makes of it, the run ends: a rank may be lost, or another trainer has taken over.
            if not isinstance(error, OF_THE_SCRIPT) and self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
            raise
        finally:
            self._calling -= 1

    # -- calls of the script -------------------------------------------------------------------------------------------

    async def next_step(self) -> int:
        """Begin a step and return its number; 0 if all steps are done, or prompts or time are used up."""
        self._check_stop()
        for record in await self._parts.evaluations.finished():
            self._parts.step_log.append(record)
        if self._done >= self._total_steps or self._used_up or self._out_of_time():
            return 0
        if self._step.training:
            raise ConfigError("publish", self._step.number, "the script has trained in this step, and not published it")
        self._step = _Step(self._done + 1)
        return self._step.number

    async def prepare(self, groups: int, timeout_s: float) -> BatchInfo | None:
        """Wait for ``groups`` groups (0: ``train.batch_groups``), and claim them; None if the prompts are used up.

        Filters and failures may take so many that the planned steps cannot all be trained. Raises TooFewGroups after
        ``timeout_s`` (0: the bounds of a run alone), StuckError. A supervised run loads the rows of the step.
        """
        self._check_stop()
        parts, step = self._parts, self._step
        begin = time.perf_counter()
        if parts.rows is not None:
            return await self._learned(parts.rows, groups)
        if parts.devices.shared and not parts.intake.state.has_batch:
            await parts.publisher.finish()  # the servers wake with this version
            await parts.devices.give_back()
        try:
            with span("wait", f"step/{step.number}"):
                waiting = parts.intake.next_batch(self._done, groups, timeout_s or math.inf)
                batch = await (waiting if step.training else unless(self._stop, waiting))
        except PromptsUsedUp as end:
            log.warning("training ends after step %d of %d: %s", self._done, self._total_steps, end)
            parts.step_log.append({"kind": USED_UP, "step": step.number, "reason": str(end)})
            self._used_up = True
            return None
        self._check_stop()
        if batch is None:
            raise TooFewGroups(
                f"{groups or self._config.train.batch_groups} groups did not arrive within {timeout_s:g} s"
            )
        step.seconds["wait"] += time.perf_counter() - begin
        failpoint("master.batch", at=step.number)
        held = parts.runner.hold(batch.groups)
        return self._add(_Held(held, batch, held, self._done))

    async def _learned(self, rows: LearnedRows, groups: int) -> BatchInfo:
        if groups not in (0, self._config.train.batch_groups) or self._step.prepared:
            size = f"train.batch_groups={self._config.train.batch_groups}"
            raise ConfigError("groups", groups, f"a step of a supervised run has one batch, of {size} lines")
        self._step.prepared = True
        begin = time.perf_counter()
        with span("wait", f"step/{self._step.number}"):
            loaded = rows.take(self._step.number - 1, self._total_steps - 1)
            batch = TrainBatch(await self._while_running(loaded), rolled_out=False)
        self._step.seconds["wait"] += time.perf_counter() - begin
        held = self._parts.runner.hold(batch.groups)
        return self._add(_Held(held, batch, held, self._done))

    async def submit(self, rows: list[tuple[int | dict[str, Any], str]]) -> Submitted:
        """Submit rows, each with the name of its agent ("": the trial's); without rows only count.

        They are durable when this returns. Raises DataError, which names the row, and ConfigError.
        """
        if self._config.data.order != "script" or self._parts.rows is not None:
            problem = "the run takes the rows in a shuffled order: set data.order=script to submit them"
            raise ConfigError("data.order", self._config.data.order, problem)
        async with self._submitting:
            if self._submitted is None:
                self._submitted = await on_disk("submitted rows", self._timeout_s, self._parts.open_submitted)
            append = self._submitted.append
            numbers = await on_disk("submitted rows", self._timeout_s, lambda: append(rows)) if rows else []
            reply = await self._parts.manager.submit(SubmitRequest(self._incarnation))
            for begin in range(0, len(numbers), MAX_TICKETS):
                request = SubmitRequest(self._incarnation, reply.total, numbers[begin : begin + MAX_TICKETS])
                reply = await self._parts.manager.submit(request)
        ledger = (await self._parts.manager.status())["ledger"]
        return Submitted(reply.total, reply.total - reply.cursor, ledger["running"] + ledger["waiting"])

    async def select(self, batch: int, sample_ids: list[str], rewards: list[float]) -> BatchInfo:
        """Return a part of a batch: these rows, and with ``rewards`` others than the verifier's. The arrays are shared.

        Raises ConfigError for rows that are not in the batch.
        """
        held = self._held(batch)
        known = {sample.sample_id: sample for sample in held.source.samples}
        if unknown := [name for name in sample_ids if name not in known]:
            raise ConfigError("batch", unknown[0], "is no row of this batch")
        given = dict(zip(sample_ids, rewards, strict=True)) if rewards else {}
        if bad := [value for value in rewards if not math.isfinite(value)]:
            raise ConfigError("rewards", bad[0], "must be finite")
        groups: dict[str, list[SampleMeta]] = {}
        for name in dict.fromkeys(sample_ids):
            sample = known[name]
            reward = given.get(name, sample.reward)
            groups.setdefault(sample.ticket_id, []).append(msgspec.structs.replace(sample, reward=reward))
        whole = held.whole
        part = HeldBatch(list(groups.values()), whole.ownership, whole.keys, whole.scores, whole.compared)
        return self._add(_Held(part, held.source, whole, held.claimed))

    async def call(self, batch: int, calls: list[ScriptCall]) -> dict[str, dict[str, float]]:
        """Run calls on a batch at the same time; return call -> its statistics, reduced over the ranks.

        Raises ConfigError for a call that the batch is not ready for, StaleBatch, NotFiniteError.
        """
        held = self._held(batch)
        for loss in {call.settings["loss"] for call in calls if "loss" in call.settings}:
            await asyncio.to_thread(LOSS.check, loss)  # it may import a file of the user
        named = {f"{call.role}.{call.what}": call for call in calls}
        flows = {name: self._flow_of(call, held) for name, call in named.items()}
        parts, step = self._parts, self._step
        args: dict[str, dict[str, Any]] = {}
        for call, flow in zip(named.values(), flows.values(), strict=True):
            [function] = flow.calls
            own = parts.arguments.of_calls(step.number, flow.calls)[function.name]
            own |= {"lr": call.lr} if call.lr is not None and function.trains else {}
            args[function.name] = own | ({PPO: call.settings} if call.settings else {})
        functions = [function for flow in flows.values() for function in flow.calls]
        whole = Dataflow(functions, held.batch.keys.difference(*(function.outputs for function in functions)))
        results = await self._computed(batch, parts.runner.call(step.number, held.batch, whole, args), args, whole)
        return {name: results[flow.calls[0].name].stats for name, flow in flows.items()}

    async def update(self, batch: int) -> dict[str, dict[str, float]]:
        """Run all calls of ``train.ppo.algorithm`` on a batch; return call -> its statistics.

        Calls on different ranks overlap. Raises StaleBatch, NotFiniteError.
        """
        held, parts = self._held(batch), self._parts
        self._check_age(held, allow_stale=False)
        if self._step.trained:
            raise ConfigError("batch", batch, "update() trains one batch a step: publish() comes before the next")
        args = parts.arguments.of_step(self._step.number)
        work = parts.runner.run(self._step.number, held.batch, args)
        results = await self._computed(batch, work, args, parts.runner.flow)
        return {name: result.stats for name, result in results.items()}

    async def drop(self, batch: int, reason: str) -> None:
        """Give up a batch that was claimed: none of its tickets will be trained."""
        held = self._held(batch)
        if any(self._batches[number].whole is held.whole for number in self._step.trained):
            raise ConfigError("batch", batch, "has been trained in this step: it cannot be dropped")
        label = f"script: {reason}"
        dropped = [(ticket, label) for ticket in held.source.tickets]
        request = TrainedRequest(self._done, self._done, dropped=dropped, incarnation=self._incarnation)
        await self._parts.manager.trained(request)
        await self._parts.runner.clear(held.whole)
        self._batches = {number: each for number, each in self._batches.items() if each.whole is not held.whole}

    async def publish(self) -> int:
        """End the step: hand the weights over, report the tickets, take a due checkpoint, write the record.

        Returns the new version. Servers get it while the script goes on.
        """
        step, parts = self._step, self._parts
        if not step.trained:
            raise ConfigError("publish", step.number, "no call has trained since the last publication")
        batches = [self._batches[number] for number in step.trained]
        sources = list({id(held.whole): held for held in batches}.values())
        batch = joined([held.source for held in sources])
        parts.arguments.observe(step.results, len(episodes_of(batch.samples)))
        step.seconds |= call_seconds(step.results, step.training)
        recorder = parts.runner.recorder
        times = await parts.publisher.begin(step.number, step.number, recorder.saved if recorder else None)
        step.watch.lap()
        failpoint("master.trained", at=step.number)
        with span("report", f"step/{step.number}"):
            statistics = await self._report_trained(step.number, batch)
        step.seconds |= {"save": times["save"], "publish": times["publish"] + step.watch.lap()}
        for held in sources:
            await parts.runner.clear(held.whole)
        trained = {id(held.whole) for held in sources}
        self._batches = {number: held for number, held in self._batches.items() if id(held.whole) not in trained}
        step.watch.lap()
        with span("save", f"step/{step.number}"):
            # The manager must know of the step before: a checkpoint says that its tickets are trained, so after a
            # recovery from it the ledger must not issue them again.
            every = self._config.checkpoint.hf_every_steps
            if every and step.number % every == 0:
                await parts.publisher.export(self._hf_folder / f"step-{step.number}")
            await parts.checkpoints.after_step(step.number)
        step.seconds |= {"checkpoint": step.watch.lap(), "total": step.watch.total()}
        record = self._record(step.number, batch, step.args, step.results)
        record |= train_record(statistics, step.seconds, step.results, self._main)
        record |= {"script": step.fields} if step.fields else {}
        parts.step_log.append({"kind": "train", "time": time.time(), **record})
        spans.add("step", step.begin, spans.now(), f"step/{step.number}", tickets=ticket_ranges(batch.tickets))
        if warning := self._signal.observe(record):
            log.warning("%s", warning)
        for warning in self._drift.observe(record):
            log.warning("%s", warning)
        await parts.show({key: record[key] for key in STATUS_FIELDS if key in record})
        self._done = step.number
        self._step = _Step(step.number + 1)
        return step.number

    async def evaluate_due(self) -> None:
        """Request the evaluations that are due after the last step; training continues while they run.

        The held-out rows of a supervised run are measured now.
        """
        every = self._config.evaluation.every_steps
        if every and self._done % every == 0 and 0 < self._done < self._total_steps:
            await self.measure(eval_id_of(self._done))
        if due := due_sets(self._sets, self._done, self._total_steps):
            await self._parts.publisher.finish()  # the manager evaluates the newest published version
            for name in due:
                await self.start_evaluation(id_of_set(eval_id_of(self._done), name), self._done)

    async def measure(self, eval_id: str) -> dict[str, Any] | None:
        """Compute the objective of a supervised run on its held-out rows, and append the record; None without any."""
        rows, runner = self._parts.rows, self._parts.runner
        if rows is None or not rows.held_out_lines:
            return None
        begin = time.perf_counter()
        await self._parts.devices.take(batch=False)
        held = runner.hold(await rows.held_out())
        args = {call.name: {"lr": 0.0, MEASURE: True} for call in runner.flow.calls}
        work = runner.call(self._step.number, held, runner.flow, args)
        results = await self._parts.stopping.run(self._done + 1, work)
        if results is None:
            return None  # the run stops
        await check_finite(results)
        await runner.clear(held)
        stats = results[self._main].stats
        record = row_record(eval_id, self._done, rows.held_out_lines, stats, time.perf_counter() - begin)
        self._parts.step_log.append(record)
        return record

    async def evaluate(self, eval_id: str) -> dict[str, float | None]:
        """Measure all evaluation sets with the newest version, and wait; return set -> accuracy."""
        await self._parts.publisher.finish()
        measured = await self.measure(eval_id)
        await self._parts.devices.give_back()
        sets = {name: made for name, made in self._sets.items() if made.problems}
        records = await self._while_running(self._parts.evaluations.run(eval_id, sets, self._done))
        for record in records:
            self._parts.step_log.append(record)
        records += [measured] if measured else []
        return {set_of_id(record["eval_id"]): record["accuracy"] for record in records}

    async def save(self) -> None:
        """Take a checkpoint of the last published version now, and wait until it is on disk."""
        await self._parts.publisher.finish()
        await self._parts.checkpoints.save()

    async def export(self, folder: str) -> None:
        """Write the newest version as a plain Hugging Face folder.

        Raises ConfigError in a run without servers once this step has trained: no rank has that version any more.
        """
        if self._step.training and not has_servers(self._config):
            problem = "without servers no rank has the last version any more once a step has trained: publish() first"
            raise ConfigError("export", folder, problem)
        await self._parts.publisher.export(Path(folder))

    async def pin(self, name: str) -> int:
        """Pin the newest version under ``name``; return it. Raises ConfigError if servers cannot keep it."""
        await self._parts.publisher.finish()
        try:
            return (await self._parts.manager.pin(PinRequest(name, self._incarnation))).version
        except StreamError as error:
            raise ConfigError("pin", name, str(error)) from None

    async def unpin(self, name: str) -> None:
        """Release the pinned version of ``name``."""
        await self._parts.manager.unpin(PinRequest(name, self._incarnation))

    async def log(self, fields: dict[str, float]) -> None:
        """Add numbers to the record of this step."""
        self._step.fields |= fields

    async def rows(self, batch: int, sample_ids: list[str], keys: list[str]) -> list[RowArrays]:
        """Return texts and arrays of rows. Raises ConfigError for an array that the batch does not have."""
        held = self._held(batch)
        if missing := [key for key in keys if key not in held.whole.keys or key not in ARRAY_KEYS]:
            raise ConfigError("keys", missing[0], f"the batch has {', '.join(sorted(held.whole.keys))}")
        wanted = ["tokens", "loss_mask", *keys]
        found: dict[str, dict[str, list[Any]]] = {name: {} for name in sample_ids}
        places: dict[tuple[int, str], list[str]] = {}
        for key in dict.fromkeys(wanted):
            for name in sample_ids:
                places.setdefault((min(held.whole.ownership.owners[key][name]), key), []).append(name)
        requests = [
            self._parts.workers.read(worker, ReadRequest(names, [key])) for (worker, key), names in places.items()
        ]
        for ((_, key), names), reply in zip(places.items(), await asyncio.gather(*requests), strict=True):
            for name, [values] in zip(names, reply.arrays, strict=True):
                found[name][key] = values
        decode = self._parts.tokenizer.decode
        texts = await asyncio.to_thread(lambda: [decode(arrays["tokens"]) for arrays in found.values()])
        return [RowArrays(name, text, arrays) for (name, arrays), text in zip(found.items(), texts, strict=True)]

    # -- behind the calls ----------------------------------------------------------------------------------------------

    async def start_evaluation(self, eval_id: str, step: int, requested_at: int | None = None) -> None:
        """Request an evaluation that is due after ``step``; training continues while it runs.

        ``requested_at``: the steps done, if a recovery requests the evaluation again.
        """
        made = self._sets[set_of_id(eval_id)]
        await self._parts.evaluations.start(eval_id, made, made.every_problems, step, requested_at=requested_at)

    @property
    def _incarnation(self) -> str:
        return self._parts.intake.state.trainer_incarnation

    def _check_stop(self) -> None:
        """Raise Stopped if the run is to stop and this step has changed no weights."""
        if self._stop.is_set() and not self._step.training:
            raise Stopped(f"the run stops after step {self._done}")

    async def _while_running(self, work: Coroutine[Any, Any, Result]) -> Result:
        result = await unless(self._stop, work)
        if result is None:
            raise Stopped(f"the run stops after step {self._done}")
        return result

    def _add(self, held: _Held) -> BatchInfo:
        self._last_batch += 1
        self._batches[self._last_batch] = held
        return BatchInfo(self._last_batch, self._done, [sample for group in held.batch.groups for sample in group])

    def _held(self, batch: int) -> _Held:
        if batch not in self._batches:
            raise ConfigError("batch", batch, "its step is published, or it was dropped: prepare another one")
        return self._batches[batch]

    def _flow_of(self, call: ScriptCall, held: _Held) -> Dataflow:
        config = self._config.with_ppo(call.settings) if call.settings else self._config
        flow = script_call(config, call.role, call.what, held.batch.keys)
        if flow.trained_roles:
            self._check_age(held, allow_stale=call.allow_stale)
        return flow

    def _check_age(self, held: _Held, *, allow_stale: bool) -> None:
        """Refuse a batch that the script has kept for too long. Its age at its claim is up to stale_policy."""
        if not held.source.rolled_out:
            return
        eta, claimed = self._config.asynchronous.max_staleness, held.claimed
        oldest = min(sample.version_min for group in held.batch.groups for sample in group)
        if self._done > claimed and self._done - oldest > eta and not allow_stale:
            raise StaleBatch(
                f"the batch has tokens of version {oldest}, and version {self._done} is trained: more than "
                f"asynchronous.max_staleness={eta} versions behind (it was prepared at version {claimed}); train it "
                "before the next publish(), drop() it, or pass allow_stale=True"
            )

    async def _computed(
        self,
        batch: int,
        work: Coroutine[Any, Any, dict[str, CallResult]],
        args: Mapping[str, dict[str, Any]],
        flow: Dataflow,
    ) -> dict[str, CallResult]:
        """Run calls of this step so that a stop can abandon them, and keep their results for its record."""
        step, parts = self._step, self._parts
        if self._stop.is_set() and not step.training:
            work.close()
        self._check_stop()
        begin = time.perf_counter()
        taken = parts.devices.take(f"step/{step.number}")
        if await (taken if step.training else unless(self._stop, taken)):
            if parts.devices.shared:
                step.seconds["switch"] = step.seconds.get("switch", 0.0) + time.perf_counter() - begin
            results = await parts.stopping.run(step.number, work)
        else:
            work.close()
            results = None
        if results is None:
            raise Stopped(f"the run stops after step {self._done}")
        await check_finite(results, parts.runner.recorder, step.number)
        for name, result in results.items():
            again = sum(known.partition("#")[0] == name for known in step.results)
            key = f"{name}#{again + 1}" if again else name
            step.results[key], step.args[key] = result, dict(args.get(name, {}))
        if trained := {call.name for call in flow.calls if call.trains and call.name in results}:
            step.training |= {key for key in step.results if key.partition("#")[0] in trained}
            if batch not in step.trained:
                step.trained.append(batch)
        return results

    def _record(
        self,
        step: int,
        batch: TrainBatch,
        args: Mapping[str, Mapping[str, Any]],
        results: Mapping[str, CallResult],
    ) -> dict[str, Any]:
        """Return the fields of the step log that neither the batch's metadata nor the calls report."""
        fields = {"step": step, "total": self._total_steps, "version": step}
        if not batch.rolled_out:
            stats = results[self._main].stats if self._main in results else {}
            known = {"accuracy": stats["accuracy"]} if "accuracy" in stats else {}
            return {**fields, "lr": args[self._main]["lr"] if self._main in args else 0.0, **known}
        trained = results["actor_train"].stats if "actor_train" in results else {}
        comparison = results["actor_inf"].stats if "actor_inf" in results else trained
        masks_truncated = self._config.train.ppo.truncated_answers == "mask"
        self._warnings.of_waste(batch.losses)
        self._warnings.of_weights(step, trained)
        return {
            **fields,
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

    async def _report_trained(self, step: int, batch: TrainBatch) -> dict[str, Any]:
        """Report to the manager which tickets version ``step`` contains; return the statistics of
        the batch.
        """
        intake = self._parts.intake.state
        staleness: dict[str, int] = {}
        if batch.rolled_out:
            statistics = batch_statistics(self._scored(batch.samples), version=step - 1)
            staleness = statistics["staleness"]["histogram"]
        else:
            statistics = row_statistics(batch.samples)
        reply = await self._parts.manager.trained(
            TrainedRequest(
                step=step,
                version=step,
                trained=batch.tickets,
                oldest=batch.oldest,
                staleness=staleness,
                incarnation=intake.trainer_incarnation,
                held=intake.held(),
            )
        )
        self._parts.publisher.keep(reply.in_use, reply.pins.values())
        if not batch.rolled_out:
            return statistics | {"memory": reply.memory}
        increases = self._increases
        intake.observe_lost(increases.tokens.of(reply.lost_tokens), increases.lengths.of(reply.lost_lengths))
        return statistics | {
            "verdict_failures": dict(increases.failures.of(reply.verdict_failures)),
            "dropped_filtered": increases.filtered.of(reply.filtered).total(),
            "memory": reply.memory,
        }

    def _scored(self, samples: list[SampleMeta]) -> list[SampleMeta]:
        """Return the rows with the rewards that the actor was trained on: with the scores of a reward model."""
        scores: dict[str, float] = {}
        for result in self._step.results.values():
            scores |= result.scores
        # The last row of an episode scores it.
        known = {(each.ticket_id, each.episode): scores[each.sample_id] for each in samples if each.sample_id in scores}
        if not known:
            return samples
        weight, replaced = self._config.train.ppo.reward_model_weight, msgspec.structs.replace
        return [replaced(s, reward=s.reward + weight * known.get((s.ticket_id, s.episode), 0.0)) for s in samples]

    def _out_of_time(self) -> bool:
        limit = self._config.train.max_seconds
        return bool(limit) and time.monotonic() - self._started > limit


def planned_steps(config: Config, train_prompts: int) -> int:
    """Return the train steps that ``train.total_steps`` and ``train.total_epochs`` allow, at least
    1.
    """
    steps = config.train.total_steps
    if config.train.total_epochs:
        steps = min(steps, max(1, config.train.total_epochs * train_prompts // config.train.batch_groups))
    return steps

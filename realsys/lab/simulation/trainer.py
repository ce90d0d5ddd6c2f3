"""Cost model of the trainer around the production intake: batches, steps, publications, reports, restarts.

groups ──push──> Intake ──batch──> claim ──> take ──> step (cost) ──> trained ──> checkpoint ─┐
                    ^                                     └──> publish (cost), one at a time  │
                    └──── give back, unless there is another batch <──────────────────────────┘

It takes devices, and gives them back, only if servers share them, as ``realsys.train.master.devices``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from realsys.algorithm.token_losses import STALE
from realsys.config.allocation import lent_servers
from realsys.config.evaluation_sets import EvaluationSet, evaluation_sets, id_of_set
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.errors import PromptsUsedUp
from realsys.lab.simulation.clock import Account, Clock
from realsys.lab.simulation.manager import ManagerMachine
from realsys.lab.simulation.rollout import GroupRun
from realsys.lab.simulation.scenarios import SimSettings
from realsys.lab.simulation.servers import Host, HostJob
from realsys.manager.messages import (
    ClaimRequest,
    DevicesReply,
    DevicesRequest,
    EvaluateRequest,
    Refusal,
    RollBackRequest,
    TrainedRequest,
)
from realsys.manager.operations import CLAIM, DEVICES, EVALUATE, ROLL_BACK, STATUS, TRAINED
from realsys.train.master.devices import HELD_S
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState, TrainBatch
from realsys.train.master.publish import VersionsInUse
from realsys.train.master.recovery import eval_id_of
from realsys.train.master.step_statistics import batch_statistics
from realsys.types import PublishedVersion, SampleMeta

STATUS_S = 5.0  # between two reports of a master that waits for a group
Stored = Callable[[], None]


class TrainerSurroundings(Protocol):
    """Everything around the trainer."""

    clock: Clock
    host: Host
    account: Account
    manager: ManagerMachine
    config: Config
    sim: SimSettings

    def waste(self, group: GroupRun, reason: str) -> None: ...

    def trained(
        self, groups: Sequence[GroupRun], version: int, in_loss: Sequence[SampleMeta], oldest: int | None
    ) -> None: ...

    def published(self, version: PublishedVersion) -> None: ...


class SimulatedTrainer:
    """The MasterWorker and all ModelWorkers, over all their restarts."""

    def __init__(self, world: TrainerSurroundings) -> None:
        self._world = world
        self.up = False
        self.life = 0  # starts
        self.version = 0
        self.checkpoint = -1
        self.weights: list[list[str]] = []  # tickets that each version trained
        self.logged = 0  # steps in the step log, which is written after the report
        self.lose_notices = 0  # stored groups that the master does not hear of
        self.used_up = ""  # why no further batch can come
        self.last_step = 0.0  # time of the last step's end
        self._held: dict[str, GroupRun] = {}  # groups in the buffer, by ticket.attempt
        self._pushes: list[tuple[GroupRun, Stored]] = []  # groups whose push waits for the trainer
        self.in_use = VersionsInUse()
        self._phase = "down"
        self._waiting_since = 0.0
        self._waits = 0  # number of calls of ``propose``
        self._intake: IntakeState
        self._batch: list[GroupRun] = []
        self._step: HostJob | None = None
        self._publishing = False
        self._blocked: Callable[[], None] | None = None  # act that waits for the end of the publication
        self._shared = bool(lent_servers(world.config))
        self._turn: Literal["unknown", "trainer", "servers"] = "unknown"

    @property
    def settled(self) -> bool:
        """True while the manager knows of every step that this trainer has taken."""
        return self._phase in ("waiting", "claiming", "taking", "training", "leaving")

    @property
    def computes(self) -> bool:
        """True from the moment that it has the devices until its step has ended."""
        return self.up and self._phase == "training"

    @property
    def incarnation(self) -> str:
        """Incarnation of the trainer that runs, or ran last."""
        return f"{self.life:019d}"

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start from the last checkpoint; roll back the steps after it."""
        self.life += 1
        self.up = True
        self._phase = "rolling back"
        self._publishing = False
        self._blocked = None
        self._turn = "unknown"
        self.in_use = VersionsInUse()
        self._intake = IntakeState(IntakeSettings.of(self._world.config), self.incarnation)
        request = RollBackRequest(self.checkpoint, self.checkpoint, self.incarnation)
        self._call(ROLL_BACK, request, self._rolled_back)

    def die(self) -> None:
        """End with everything that was not in the checkpoint."""
        self.up = False
        self._phase = "down"
        if self._step is not None:
            self._step.cancel()
        for group in [*self._held.values(), *self._batch]:
            self._world.waste(group, "trainer lost")
        self._held.clear()
        self._batch = []

    def _call(self, operation: Any, request: Any, then: Callable[[Any], None]) -> None:
        life = self.life

        def reply(result: Any) -> None:
            if not self.up or life != self.life:
                return
            if isinstance(result, Refusal):
                raise AssertionError(f"trainer {self.incarnation}, {operation.path}: {result}")
            then(result)

        self._world.manager.call(operation, request, reply)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        life = self.life
        self._world.clock.after(seconds, lambda: act() if self.up and life == self.life else None)

    def _rolled_back(self, _: Any) -> None:
        self.version = max(0, self.checkpoint)
        self._world.account.roll_back(self.version)
        del self.weights[self.version :]
        self.logged = self.version
        self._take(self._loaded, batch=False)

    def _loaded(self) -> None:
        self._publish()
        pushes, self._pushes = self._pushes, []
        for push in pushes:
            self.push(*push)
        self._wait()

    # -- groups --------------------------------------------------------------------------------------------------------

    def push(self, group: GroupRun, stored: Stored) -> None:
        """Take a group at its DP head; call ``stored`` when the push is acknowledged."""
        world = self._world
        if not self.up or self._phase == "rolling back":
            self._pushes.append((group, stored))
            return
        group.arrived = world.clock.now
        if group.ticket.trainer_incarnation != self.incarnation:  # a DP head refuses it
            world.waste(group, "rolled back")
        elif self.lose_notices:
            self.lose_notices -= 1
            world.waste(group, "never arrived")
        else:
            self._held[f"{group.ticket.ticket_id}.{group.ticket.attempt}"] = group
            self._intake.add(group.samples())
            self._carry_out()
            self._propose()
        stored()

    def _carry_out(self) -> None:
        """Report and free what the intake will not train."""
        departures = self._intake.depart()
        reasons: dict[str, str] = dict(departures.dropped) | {ticket: STALE for ticket, _ in departures.stale}
        for sample in departures.free:
            if group := self._held.pop(f"{sample.ticket_id}.{sample.attempt}", None):
                self._world.waste(group, reasons.get(sample.ticket_id, "copy"))
        if departures.dropped or departures.stale:
            request = self._report(dropped=departures.dropped, stale=departures.stale)
            self._call(TRAINED, request, lambda _: self._intake.reported(departures))

    def _report(self, **fields: Any) -> TrainedRequest:
        return TrainedRequest(self._intake.version, self._intake.version, incarnation=self.incarnation, **fields)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the next batch."""
        self._waiting_since = self._world.clock.now
        if self._shared and self._turn != "servers" and not self._intake.has_batch:
            self._phase = "leaving"
            self._when_published(partial(self._later, self._world.sim.trainer.move_s, self._leave))
            return
        self._phase = "waiting"
        self._propose()

    def _leave(self) -> None:
        def left(_: DevicesReply) -> None:
            self._turn = "servers"
            self._phase = "waiting"
            self._propose()

        self._call(DEVICES, DevicesRequest(self.incarnation, "servers"), left)

    def _take(self, then: Callable[[], None], *, batch: bool = True) -> None:
        """Do ``then`` when all servers that share the devices sleep."""
        if not self._shared or self._turn == "trainer":
            then()
            return

        def taken(reply: DevicesReply) -> None:
            if reply.done:
                self._turn = "trainer"
                self._later(self._world.sim.trainer.move_s, then)
            else:
                self._take(then, batch=batch)

        self._call(DEVICES, DevicesRequest(self.incarnation, "trainer", batch, HELD_S), taken)

    def _propose(self) -> None:
        if self._phase != "waiting":
            return
        tickets = self._intake.propose(self.version)
        self._carry_out()
        self._waits += 1
        if tickets:
            self._phase = "claiming"
            request = ClaimRequest(self.version + 1, tickets, self.incarnation)
            self._call(CLAIM, request, lambda reply: self._claimed(reply.gone))
        else:
            self._intake.begin_wait(self._world.clock.now)
            self._later(STATUS_S, partial(self._check_wait, self._waits))

    def _check_wait(self, wait: int) -> None:
        """Look for the cause when no group has arrived for a while, as a waiting master does."""
        if self._phase != "waiting" or wait != self._waits:
            return
        self._call(TRAINED, self._report(held=self._intake.held()), lambda _: None)
        self._call(STATUS, None, self._check_status)
        self._later(STATUS_S, partial(self._check_wait, wait))

    def _check_status(self, status: Mapping[str, Any]) -> None:
        if self._turn == "servers" and status["devices"]["turn"] == "unknown":
            self._call(DEVICES, DevicesRequest(self.incarnation, "servers"), lambda _: None)
        try:
            self._intake.check_wait(status, self._world.clock.now)
        except PromptsUsedUp as end:
            self.used_up = str(end)

    def _claimed(self, gone: list[str]) -> None:
        batch = self._intake.conclude(gone)
        if batch is not None:  # before its rows without a token in the loss are freed
            self._batch = [self._held.pop(f"{rows[0].ticket_id}.{rows[0].attempt}") for rows in batch.groups]
        self._carry_out()
        if batch is None:
            self._phase = "waiting"
            self._propose()
            return
        now, account = self._world.clock.now, self._world.account
        account.wait("batch", now - self._waiting_since)
        for group in self._batch:
            account.wait("buffer", now - group.arrived)
        self._phase = "taking"
        moves = self._shared and self._turn != "trainer"
        self._take(partial(self._compute, batch, now - self._waiting_since, now if moves else None))

    def _compute(self, batch: TrainBatch, wait: float, moves_since: float | None) -> None:
        world, now, costs = self._world, self._world.clock.now, self._world.sim.trainer
        if moves_since is not None:
            world.account.wait("switch", now - moves_since)
        self._phase = "training"
        tokens = sum(group.tokens for group in self._batch)
        seconds = costs.step_s + costs.step_s_per_token * tokens
        record = {"time": now, "wait": wait, "tokens": float(tokens)}
        cores = world.host.settings.trainer_cores
        self._step = HostJob(world.clock, world.host, cores, seconds, partial(self._computed, batch, record))

    def _computed(self, batch: TrainBatch, record: dict[str, float]) -> None:
        world = self._world
        world.account.busy_s += world.clock.now - record["time"]
        self._when_published(partial(self._stepped, batch, record))

    def _when_published(self, act: Callable[[], None]) -> None:
        """Do ``act`` when no version is being written."""
        if self._publishing:
            self._blocked = act
        else:
            act()

    def _stepped(self, batch: TrainBatch, record: dict[str, float]) -> None:
        """Begin to publish the next version, and report its tickets."""
        statistics = batch_statistics(batch.samples, version=self.version)
        self.version += 1
        groups, self._batch = self._batch, []
        self.weights.append(batch.tickets)
        self._world.trained(groups, self.version, batch.samples, batch.oldest_trained)
        histogram = statistics["staleness"]["histogram"]
        account = self._world.account
        account.staleness.update({int(lag): rows for lag, rows in histogram.items()})
        account.steps.append(record | {"step": float(self.version), "staleness": statistics["staleness"]["mean"]})
        self._publishing = True
        self._later(self._world.sim.trainer.publish_s, self._written)
        request = TrainedRequest(
            step=self.version,
            version=self.version,
            trained=batch.tickets,
            oldest=batch.oldest,
            staleness=histogram,
            incarnation=self.incarnation,
            held=self._intake.held(),
        )
        self._phase = "reporting"
        self._call(TRAINED, request, lambda reply: self._reported(reply.in_use))

    def _reported(self, in_use: list[int]) -> None:
        self.in_use.keep(in_use)
        config, step = self._world.config, self.version
        self.last_step = self._world.clock.now
        self.logged = step
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            self.checkpoint = step
        sets = evaluation_sets(config)
        if due := [made for made in sets.values() if made.every_steps and step % made.every_steps == 0]:
            self._when_published(partial(self._evaluate, due))  # the manager evaluates the newest published version
        else:
            self._wait()

    def _evaluate(self, sets: list[EvaluationSet]) -> None:
        config = self._world.config
        for made in sets:
            eval_id = id_of_set(eval_id_of(self.version), made.name)
            request = EvaluateRequest(eval_id, HELD_OUT, made.every_problems, config.seed, self.incarnation)
            request.samples, request.set = made.samples, made.name
            self._call(EVALUATE, request, lambda _: None)
        self._wait()

    def _written(self) -> None:
        self._publishing = False
        self._publish()
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            blocked()

    def _publish(self) -> None:
        locator = f"v{self.version}-{self.incarnation}"
        self.in_use.add(self.version, locator)
        self._world.published(PublishedVersion(self.version, self.incarnation, locator, self.version))

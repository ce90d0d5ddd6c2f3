"""A simulated trial: manager, servers, workers and trainer on one clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from realsys.config.allocation import lent_servers, parse_allocation
from realsys.lab.simulation.clock import Account, Clock
from realsys.lab.simulation.manager import ManagerMachine, heartbeat
from realsys.lab.simulation.rollout import GroupRun, Lengths, Worker
from realsys.lab.simulation.scenarios import Plan
from realsys.lab.simulation.servers import Host, SimulatedEngine
from realsys.lab.simulation.trainer import SimulatedTrainer
from realsys.manager.decisions import ManagerSettings
from realsys.manager.ledger.events import Event, Reissued
from realsys.manager.ledger.ledger import STALE
from realsys.manager.routing.lending import Shift
from realsys.manager.routing.placement import LOAD_PERIOD_S
from realsys.manager.routing.servers import UpdateOrder
from realsys.types import PublishedVersion, SampleMeta, ServerAddress

EVAL_PROMPTS = 4096


class Simulation:
    """One run of a plan. Equal plans give equal runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config = plan.config
        self.sim = plan.sim
        self.clock = Clock()
        self.host = Host(self.sim.host)
        self.account = Account()
        self.random = Random(self.config.seed)
        self.servers = parse_allocation(self.config.allocation).inference.data
        self.lent = lent_servers(self.config)
        self.lengths = Lengths(self.sim.lengths, self.config.seed)
        self.agent_failures = 0
        self.false_reports = 0
        self.failing_updates = 0
        self.open: set[GroupRun] = set()
        self.engines: dict[str, SimulatedEngine] = {}
        self.births: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.versions: list[PublishedVersion] = []  # on disk, oldest first
        sizes = {"train": self.sim.prompts, "eval": EVAL_PROMPTS}
        # No script submits prompts here; which ones are played changes no time.
        settings = replace(ManagerSettings.of(self.config.model_copy(), sizes), order="shuffled")
        self.manager = ManagerMachine(self.clock, settings, self, self.sim.call_s)
        self.manager.journal.observe = self._observe
        self.trainer = SimulatedTrainer(self)
        self.faults = Faults(self)
        self._routable_since = 0.0
        self._routable = -1
        self._revision = -1
        self._quarantined: set[tuple[str, str]] = set()

    # -- run -----------------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[Simulation], None] = lambda _: None) -> None:
        """Run to the end of the plan. Raises Broken, with the command that repeats it, if an invariant fails."""
        for index in range(self.servers):
            self.start_server(f"generation_server/{index}")
        for index in range(self.config.rollout.workers):
            self.start_worker(f"rollout_worker/{index}")
        self.trainer.start()
        self.faults.start()
        self.clock.after(LOAD_PERIOD_S, self._measure_loads)
        try:
            every = self.sim.check_every
            while not self._over():
                if not self.clock.step():
                    raise Broken("nothing is left to happen", self)
                self._watch_routes()
                if every and self.clock.events % every == 0:
                    check_cheap(self)
                if not self.clock.events % 1024:
                    progress(self)
            check_cheap(self)
            auditor = self.manager.journal.auditor
            logged = dict(enumerate(self.trainer.weights[: self.trainer.logged], 1))
            auditor.compare_steps(logged)
            report = auditor.report()
            failed = {check.name: check.problems[:5] for check in report.checks if not check.ok}
            if failed:
                raise Broken(f"audit: {failed}", self)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}", self) from error

    def _over(self) -> bool:
        sim, now = self.sim, self.clock.now
        if self.trainer.used_up:
            return True
        if now - self.trainer.last_step > 3600 * sim.stalled_h:
            raise Broken(f"no train step for {sim.stalled_h:g} hours", self)
        return bool((sim.steps and self.trainer.logged >= sim.steps) or (sim.hours and now >= 3600 * sim.hours))

    # -- processes -----------------------------------------------------------------------------------------------------

    def start_server(self, name: str) -> None:
        self.births[name] = self.births.get(name, 0) + 1
        self.engines[name] = SimulatedEngine(self.clock, self.sim.server, self.host, asleep=name in self.lent)
        self._tell_servers()

    def kill_server(self, name: str) -> None:
        """The server dies; its requests fail, the name store forgets it later, and it starts again."""
        engine = self.engines[name]
        lost = engine.die()
        self.clock.after(self.sim.notice_s, self._forget_server, name, engine)
        self.clock.after(self.sim.notice_s + self.sim.server.start_s, self.start_server, name)
        for worker in self.workers.values():
            for group in worker.groups_on(engine):
                worker.server_died(group, lost[id(group.request)])

    def _forget_server(self, name: str, engine: SimulatedEngine) -> None:
        if self.engines.get(name) is engine:
            del self.engines[name]
            self._tell_servers()

    def _tell_servers(self) -> None:
        born = self.births
        self.manager.observe_servers(
            ServerAddress(name, f"http://{name}", 1, "simulated", str(born[name])) for name in self.engines
        )

    def start_worker(self, name: str) -> None:
        self.births[name] = self.births.get(name, 0) + 1
        self.workers[name] = Worker(self, name, str(self.births[name]))
        self._tell_workers()
        self.clock.after(self.random.random(), self.workers[name].ask)

    def kill_worker(self, name: str) -> None:
        """The worker dies; its heartbeat ends later, and then it starts again."""
        worker = self.workers[name]
        worker.die()
        self.clock.after(self.sim.notice_s, self._forget_worker, name, worker)

    def _forget_worker(self, name: str, worker: Worker) -> None:
        del self.workers[name]
        self._tell_workers()
        self.clock.after(1.0, self.start_worker, name)

    def _tell_workers(self) -> None:
        beats = {name: heartbeat("rollout_worker", 0, worker.incarnation) for name, worker in self.workers.items()}
        self.manager.observe_workers(beats)

    def kill_trainer(self) -> None:
        self.trainer.die()
        self.clock.after(self.sim.trainer.start_s, self.trainer.start)

    def kill_manager(self) -> None:
        self.manager.stop()
        self.clock.after(5.0, self.manager.start)

    # -- servers, as the manager reaches them --------------------------------------------------------------------------

    def engine(self, server: str) -> SimulatedEngine | None:
        return self.engines.get(server)

    def model_info(self, name: str, incarnation: str) -> tuple[str, str] | None:
        """Return version and locator that a server reports; None if this incarnation is not up."""
        engine = self._addressed(name, incarnation)
        if engine is None:
            return None
        return (str(engine.serving.version), engine.serving.locator) if engine.serving else ("", "")

    def server_load(self, name: str, incarnation: str) -> tuple[int, int] | None:
        """Return sequences and cached tokens that a server reports; None if this incarnation is not up."""
        engine = self._addressed(name, incarnation)
        return engine.load() if engine else None

    def load(self, order: UpdateOrder, done: Callable[[str], None]) -> None:
        """Stage, then swap. It fails if the server dies, if a fault is due, or if the version is deleted before."""
        engine = self._addressed(order.server, order.incarnation)
        if engine is None:
            self.clock.after(self.sim.call_s, done, "connection refused")
            return
        seconds = self.sim.server.stage_s * (0.9 + 0.2 * self.random.random())
        self.clock.after(seconds, self._staged, order, engine, done)

    def _staged(self, order: UpdateOrder, engine: SimulatedEngine, done: Callable[[str], None]) -> None:
        if not engine.up:
            done("connection closed")
        elif self.failing_updates:
            self.failing_updates -= 1
            done("simulated error")
        elif engine.asleep:
            done("asleep")
        elif order.target not in self.versions:
            done(f"{order.target.locator} cannot be read")
        else:
            engine.swap(order.target, partial(done, ""))

    def shift(self, order: Shift, done: Callable[[str], None]) -> None:
        """Let a server sleep or wake. It fails if the server dies, or if a fault is due."""
        engine = self._addressed(order.server, order.incarnation)
        if engine is None or self.failing_updates:
            self.failing_updates -= engine is not None
            self.clock.after(self.sim.call_s, done, "connection refused" if engine is None else "simulated error")
        else:
            engine.shift(order.sleeps, lambda: done("" if engine.up else "connection closed"))

    def _addressed(self, name: str, incarnation: str) -> SimulatedEngine | None:
        engine = self.engines.get(name)
        return engine if engine is not None and engine.up and str(self.births[name]) == incarnation else None

    # -- groups and versions -------------------------------------------------------------------------------------------

    def push(self, group: GroupRun, stored: Callable[[], None]) -> None:
        self.trainer.push(group, stored)

    def waste(self, group: GroupRun, reason: str) -> None:
        """Close an attempt whose tokens are not trained."""
        if not group.over:
            group.over = True
            self.open.remove(group)
            if group.ticket.kind == "eval" and reason == "evaluation":
                self.account.evaluated += group.tokens
            else:
                self.account.wasted[reason] += group.tokens

    def trained(
        self, groups: Sequence[GroupRun], version: int, in_loss: Sequence[SampleMeta], oldest: int | None
    ) -> None:
        """Close the attempts of a step that became ``version``.

        ``in_loss``: rows as they are trained, without the tokens of versions below ``oldest``.
        """
        if problem := check_loss(self, groups, in_loss, version, oldest):
            raise Broken(problem, self)
        tokens = sum(row.loss_tokens for row in in_loss)
        for group in groups:
            group.over = True
            self.open.remove(group)
        self.account.trained[version] += tokens
        if masked := sum(group.tokens for group in groups) - tokens:
            self.account.wasted["masked"] += masked
        self.account.in_loss.extend(row.loss_tokens for row in in_loss)

    def published(self, version: PublishedVersion) -> None:
        """Set the name-store key, then prune all but the newest versions and those in use."""
        self.versions.append(version)
        self.clock.after(self.sim.call_s, self.manager.publish, version)
        newest = self.versions[-self.config.weights.keep_versions :]
        kept = {*self.trainer.in_use.locators(), *(kept.locator for kept in newest)}
        self.versions = [old for old in self.versions if old.locator in kept]

    # -- measurements --------------------------------------------------------------------------------------------------

    def _measure_loads(self) -> None:
        self.clock.after(LOAD_PERIOD_S, self._measure_loads)
        self.account.measure_loads([engine.load() for engine in self.engines.values()])

    def _observe(self, event: Event) -> None:
        if isinstance(event, Reissued) and event.cause == STALE:
            prompt = self.manager.state.ledger.columns.prompt[int(event.ticket_id)]
            self.account.stale_issues[prompt] += 1

    def _watch_routes(self) -> None:
        """Integrate the number of routable servers over time, and count new quarantines."""
        servers, now = self.manager.state.servers, self.clock.now
        if servers.revision == self._revision:
            return
        account, seconds = self.account, now - self._routable_since
        if self._routable >= 0:
            account.routable_s += self._routable * seconds
            account.served_s += self.servers * seconds
        self._routable_since, self._revision = now, servers.revision
        if self._routable >= 0 or servers.published is not None:
            self._routable = len(self.manager.state.router.routes(None))
        quarantined = {(s.name, s.address.incarnation) for s in servers.all() if s.quarantined}
        account.quarantines += len(quarantined - self._quarantined)
        self._quarantined = quarantined


# ---- fault schedule: each kind is a Poisson process with its own generator, so that one kind does not move another


class Faults:
    """Injects the faults of ``sim.faults`` into a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = {kind: Random(f"{simulation.config.seed} {kind}") for kind in self._kinds()}

    def _kinds(self) -> dict[str, Callable[[Random], bool]]:
        """Return the kinds, each with a function that returns False if it cannot happen now."""
        return {
            "server_dies": self._server_dies,
            "worker_dies": self._worker_dies,
            "manager_restarts": self._manager_restarts,
            "trainer_restarts": self._trainer_restarts,
            "false_report": self._false_report,
            "update_fails": self._update_fails,
            "reply_lost": self._reply_lost,
            "notice_lost": self._notice_lost,
            "rollout_fails": self._rollout_fails,
        }

    def start(self) -> None:
        """Plan the first fault of each kind."""
        for kind in self._random:
            self._plan(kind)

    def _plan(self, kind: str) -> None:
        hours = getattr(self._simulation.sim.faults, kind)
        if hours:
            seconds = self._random[kind].expovariate(1.0 / (3600 * hours))
            self._simulation.clock.after(seconds, self._happen, kind)

    def _happen(self, kind: str) -> None:
        if self._kinds()[kind](self._random[kind]):
            self._simulation.account.faults[kind] += 1
        self._plan(kind)

    def _server_dies(self, random: Random) -> bool:
        up = sorted(name for name, engine in self._simulation.engines.items() if engine.up)
        if up:
            self._simulation.kill_server(random.choice(up))
        return bool(up)

    def _worker_dies(self, random: Random) -> bool:
        up = sorted(name for name, worker in self._simulation.workers.items() if worker.up)
        if up:
            self._simulation.kill_worker(random.choice(up))
        return bool(up)

    def _manager_restarts(self, random: Random) -> bool:
        up = self._simulation.manager.up
        if up:
            self._simulation.kill_manager()
        return up

    def _trainer_restarts(self, random: Random) -> bool:
        up = self._simulation.trainer.up
        if up:
            self._simulation.kill_trainer()
        return up

    def _false_report(self, random: Random) -> bool:
        self._simulation.false_reports += 1
        return True

    def _update_fails(self, random: Random) -> bool:
        self._simulation.failing_updates += 1
        return True

    def _reply_lost(self, random: Random) -> bool:
        self._simulation.manager.lose_replies += 1
        return True

    def _notice_lost(self, random: Random) -> bool:
        self._simulation.trainer.lose_notices += 1
        return True

    def _rollout_fails(self, random: Random) -> bool:
        self._simulation.agent_failures += 1
        return True


# ---- checks of a simulation, by the names of the invariants
#
# The audit of the journal reads every record, by independent rules: ``admission``, ``one-end``, ``claim-before-train``
# and ``monotonic``. The rest is checked here, against the cost models.


class Broken(AssertionError):
    """An invariant does not hold. The text ends with the command that repeats the simulation."""

    def __init__(self, problem: str, simulation: Simulation) -> None:
        self.problem = problem
        clock = simulation.clock
        where = f"at {clock.now / 3600:.4f} h, event {clock.events}, seed {simulation.config.seed}"
        super().__init__(f"{problem}\n{where}; to repeat it: {simulation.plan.command()}")


def check_cheap(simulation: Simulation) -> None:
    """Check everything that takes time in proportion to the open tickets. Raises Broken."""
    for check in (_audit, _tokens, _servers, _devices, _reservations, _ledger):
        if problem := check(simulation):
            raise Broken(problem, simulation)


def check_loss(
    simulation: Simulation,
    groups: Sequence[GroupRun],
    in_loss: Sequence[SampleMeta],
    version: int,
    oldest: int | None,
) -> str:
    """Return the problem if a step into ``version`` trains other tokens than the policy allows, else ""."""
    settings = simulation.config.asynchronous
    bound = None if settings.stale_policy == "train" else version - 1 - settings.max_staleness
    if oldest != bound:
        return f"staleness: version {version} trains tokens of version {oldest} on, and the bound is {bound}"
    allowed = sum(
        tokens
        for group in groups
        for completion in group.completions
        for sampled, tokens in completion.versions.items()
        if bound is None or sampled >= bound
    )
    found = sum(row.loss_tokens for row in in_loss)
    if found == allowed:
        return ""
    return f"staleness: {found} tokens are in the loss of version {version}, and {allowed} are within the bound"


def _audit(simulation: Simulation) -> str:
    problems = {name: found[:3] for name, found in simulation.manager.journal.auditor.problems.items() if found}
    return f"audit: {problems}" if problems else ""


def _tokens(simulation: Simulation) -> str:
    """``no-waste``: each sampled token is open, trained, or wasted for a reason."""
    return simulation.account.balance(sum(group.tokens for group in simulation.open))


def _servers(simulation: Simulation) -> str:
    """``monotonic``, ``fenced-weights``: a routable server serves a verified version within the bound."""
    state = simulation.manager.state
    if not simulation.manager.up or state.servers.published is None:
        return ""
    published, eta = state.servers.published, simulation.config.asynchronous.max_staleness
    for load in state.router.routes(None):
        server, engine = state.servers.get(load.name), simulation.engines.get(load.name)
        assert server is not None
        verified = server.verified
        if verified is None or verified.incarnation != published.incarnation:
            return f"fenced-weights: {load.name} is routable with {verified}, published is {published}"
        if not 0 <= published.version - verified.version <= eta:
            return f"fenced-weights: {load.name} is routable at {verified.version}, published is {published.version}"
        same = engine is not None and engine.up and str(simulation.births[load.name]) == server.address.incarnation
        if same and engine is not None:
            serving = engine.serving
            if serving is None or (serving.incarnation, serving.version) < (verified.incarnation, verified.version):
                return f"fenced-weights: {load.name} is trusted with {verified}, and serves {serving}"
    return ""


def _devices(simulation: Simulation) -> str:
    """``one-at-a-time``: no server has memory on devices on which the trainer computes."""
    if not simulation.trainer.computes:
        return ""
    awake = [
        name
        for name in sorted(simulation.lent & simulation.engines.keys())
        if (engine := simulation.engines[name]).up and not engine.asleep
    ]
    return f"one-at-a-time: the trainer computes, and {awake[0]} is awake" if awake else ""


def _reservations(simulation: Simulation) -> str:
    """Every place belongs to a running attempt, and the loads are their sums."""
    state = simulation.manager.state
    reservations, loads, found = state.reservations, Counter[str](), 0
    for ticket_id in [*state.ledger.open, *state.evaluations.running]:
        for call in reservations.calls(ticket_id):
            place = reservations.get(ticket_id, call)
            assert place is not None
            found += 1
            loads[place.server] += place.sequences
            ticket = state.ledger.open.get(ticket_id)
            if ticket is not None and ticket.state != "running":
                return f"ticket {ticket_id} is {ticket.state}, and has a place on {place.server}"
    if found != len(reservations):
        return f"{len(reservations) - found} places belong to no open ticket"
    wrong = [s.name for s in state.servers.all() if reservations.load(s.name)[0] != loads[s.name]]
    return f"the load of {wrong[0]} is not the sum of its places" if wrong else ""


def _ledger(simulation: Simulation) -> str:
    """``one-end``: the counts are those of the tickets, and what the trainer has trained is in the ledger."""
    ledger, trainer = simulation.manager.state.ledger, simulation.trainer
    states = Counter(ticket.state for ticket in ledger.open.values())
    if wrong := [state for state, count in ledger.counts.open.items() if states[state] != count]:
        return f"one-end: the ledger counts {ledger.counts.open}, and has {dict(states)}: {wrong[0]}"
    version = min(trainer.version, ledger.newest)
    if trainer.up and trainer.settled and version > 0:
        ends = {ledger.ended(ticket_id) for ticket_id in trainer.weights[version - 1]}
        if ends != {f"trained@{version}"}:
            return f"one-end: version {version} trained tickets that the ledger has as {ends}"
    return ""

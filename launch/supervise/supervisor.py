"""Starts the processes of a trial, restarts those that may be restarted, stops all of them.

    consumes     ProcessSpecs
    waits for    the agents of other nodes, the exit of any process, SIGINT/SIGTERM/SIGHUP
    ends when    the MasterWorker has finished and exits 0 (done), a death ends the run or a restart budget is spent
                 (failed), or a signal arrives (interrupted)
    leaves       no process: every node kills what is left of its processes and of their descendants

A node (realsys.launch.nodes) starts processes, signals them and reports their ends; all decisions are made here, in the
same way for this machine and for others.

An exception in the launcher fails the run like any other: all processes are stopped and the error is reported.

restart_policy.py decides what a death means. The trainer (ModelWorkers and MasterWorker) ends as a whole: if one of its
processes dies, the others are killed, and then all are started together. stop.py ends the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol

from realsys.cluster.aio import FULL
from realsys.cluster.process import TRAINING_START, ErrorRecord
from realsys.errors import ConfigError, RealsysError
from realsys.launch.nodes.orders import (
    LOCAL,
    Exit,
    MachineMissing,
    NodeListener,
    Process,
    ProcessId,
    ProcessOrder,
    SupervisedNode,
    all_ready,
)
from realsys.launch.process_plan import LEADERS, NAME_STORE, ProcessSpec
from realsys.launch.supervise.failures import first_cause, last_error, process_of
from realsys.launch.supervise.restart_policy import (
    NO_CHECKPOINT,
    Cause,
    Death,
    EndDecision,
    Failure,
    GiveUp,
    Restart,
    RestartPolicy,
    TrialOutcome,
    is_spare,
)
from realsys.launch.supervise.stop_request import stop_signals
from realsys.observe.step_log import EventKind

log = logging.getLogger(__name__)

P = ParamSpec("P")

_REPLACEABLE = {
    "generation_server": "generation servers",
    "rollout_worker": "RolloutWorkers",
    "reward_service": "reward services",
}
_SAME_SIGNAL_S = 2.0
_ROOM_POLL_S = 0.5
_BAD_INPUT = 2  # RealsysError.exit_code of ConfigError, DataError, ModelError


Method = Callable[Concatenate["Supervisor", P], None]


def _from_the_loop(method: Method[P]) -> Method[P]:
    """Fail the run for an exception: the event loop would log it and continue, and a process would stay missing."""

    def guarded(supervisor: Supervisor, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(supervisor, *args, **kwargs)
        except Exception as exc:
            supervisor.fail(exc)

    return guarded


class Supervisor:
    """Owns the child processes of one trial from start to end."""

    def __init__(
        self, specs: Sequence[ProcessSpec], bounds: Bounds, hooks: Hooks, nodes: Mapping[str, SupervisedNode]
    ) -> None:
        """``nodes``: those that the specs name."""
        self._bounds = bounds
        self._hooks = hooks
        self._nodes = nodes
        self._children = [Child(spec, nodes[spec.node]) for spec in specs]
        self._trainer = TrainerProcesses(
            [child for child in self._children if child.spec.on_death == "restart_training"]
        )
        self._policy = RestartPolicy(bounds.max_restarts, bounds.first_backoff_s)
        self._outcome: TrialOutcome | None = None
        self._deaths: list[Death] = []
        self._restarted: list[Death] = []
        self._first_deaths: dict[str, tuple[Death, float]] = {}  # server whose parts are being killed -> cause, ran_s
        self._given_up: list[str] = []
        self._full: Death | None = None  # the first one since the disk had room
        self._full_since = 0.0  # monotonic seconds; 0: no restart waits for room
        self._changes = Changes()
        self._interrupted = 0.0  # monotonic seconds
        self._stop = StopSequence(self._children, bounds, hooks, self._changes, list(nodes.values()))
        for node in nodes.values():
            node.listener = NodeListener(stop=self._stop_asked, fail=self.fail, say=hooks.say)

    @property
    def restarts(self) -> int:
        return len(self._restarted)

    def running(self) -> dict[str, int]:
        """Return name -> pid of the processes that run."""
        return pids_of(self._children)

    async def run(self) -> TrialOutcome:
        """Start everything, wait for the end of the run, stop everything."""
        with stop_signals(self.interrupt):
            try:
                await self._start_all()
                await self._changes.until(lambda: self._outcome is not None)
            except Exception as exc:
                self.fail(exc)
            finally:
                self._end(TrialOutcome("failed", "the launcher was cancelled"))  # unless it has ended otherwise
                assert self._outcome is not None
                self._deaths += self._trainer.deaths  # it was being killed: its failures are causes, too
                self._trainer.cancel()
                killed = await self._stop.run(orderly=self._outcome.status == "interrupted")
        assert self._outcome is not None
        outcome = self._outcome
        outcome.deaths = self._deaths
        outcome.restarted = self._restarted
        outcome.given_up = self._given_up
        outcome.recovered = self._policy.recovered
        outcome.killed = killed
        return outcome

    def interrupt(self, signum: int) -> None:
        """End the run as a signal does; the second call kills what still runs.

        SIGTERM never hurries a stop that has just begun: a batch system may send it to a process more than once.
        """
        now = time.monotonic()
        if self._outcome is not None:
            if signum == signal.SIGTERM and now < self._interrupted + _SAME_SIGNAL_S:
                return
            self._stop.hurry = True
            self._changes.note()
            return
        self._interrupted = now
        self._end(TrialOutcome("interrupted", f"stopped by {signal.Signals(signum).name}", signal=signum))

    def _stop_asked(self, signum: int) -> None:
        """End the run because a node got a signal. Further ones do not hurry it: a batch system signals every node."""
        if self._outcome is None:
            self.interrupt(signum)

    def fail(self, exc: Exception) -> None:
        """End the run for an exception in the launcher itself."""
        log.error("the launcher failed", exc_info=exc)
        self._end(TrialOutcome("failed", f"the launcher failed: {type(exc).__name__}: {exc}"))

    # ---- start

    async def _start_all(self) -> None:
        others = {name: node for name, node in self._nodes.items() if name != LOCAL}
        imported = False
        if others:
            self._hooks.say(f"waiting for the agents of {', '.join(others)} (realsys node-agent)")
            await self._wait_for("the start", self._hooks.launch())
            await self._wait_for("the start", all_ready(others, self._bounds.join_s))
        for child in self._children:
            if child.spec.kind != NAME_STORE and not imported and LOCAL in self._nodes:
                imported = True
                await self._wait_for("the imports", self._nodes[LOCAL].ready(self._bounds.join_s))
            self._start(child)
            if child.spec.kind == NAME_STORE:
                address = self._nodes[child.spec.node].address
                await self._wait_for(child.spec.name, self._hooks.name_store_ready(child.spec, address))
            else:
                await asyncio.sleep(0)  # a process that cannot be started ends the run before the next one starts
        self._trainer.mark_complete()

    async def _wait_for(self, name: str, what: Awaitable[object]) -> None:
        """Return when it is ready, or when the run ends before that."""
        ready = asyncio.ensure_future(what)
        ready.add_done_callback(lambda _: self._changes.note())
        try:
            await self._changes.until(lambda: ready.done() or self._outcome is not None)
            if self._outcome is None:
                ready.result()
        except ConfigError as error:
            self._end(TrialOutcome("failed", str(error), refused=error))
        except RealsysError as error:
            self._end(TrialOutcome("failed", f"{name}: {error}", no_machine=isinstance(error, MachineMissing)))
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    @_from_the_loop
    def _restart(self, child: Child) -> None:
        if self._lacks_room():
            child.pending = asyncio.get_running_loop().call_later(_ROOM_POLL_S, self._restart, child)
        else:
            self._start(child)

    def _lacks_room(self) -> bool:
        """Return True while a disk that was found full has no room for a step. Ends the run after ``room_s``.

        A restart would fail again, and so the restarts of all processes would be spent within seconds.
        """
        if self._full is None or self._outcome is not None:
            return False
        problem, now = self._hooks.no_room(), time.monotonic()
        if not problem:
            self._full, self._full_since = None, 0.0
        elif not self._full_since:
            self._full_since = now
            self._hooks.say(f"{problem}: restarts wait up to {self._bounds.room_s:g} s for room")
        elif now > self._full_since + self._bounds.room_s:
            self._deaths.append(self._full)
            self._end(TrialOutcome("failed", f"{problem}: free space, then run the command again"))
        return bool(problem)

    @_from_the_loop
    def _start(self, child: Child) -> None:
        child.pending = None
        if self._outcome is not None:
            return
        env = {TRAINING_START: str(self._trainer.starts)} if child.spec.on_training_side else {}
        child.start(env, self._bounds.log_bytes, self._on_exit)

    # ---- deaths

    @_from_the_loop
    def _on_exit(self, child: Child, process: Process, ended: Exit) -> None:
        spec = child.spec
        if ended.problem:
            reason = f"{spec.name} cannot be started: {ended.problem}"
            self._end(TrialOutcome("failed", reason, no_machine=ended.no_machine))
            return
        failed = self._outcome is None and ended.returncode > 0
        error, defect = last_error(ended.log_end) if failed else ("", ())
        if failed and not error:  # its last words may have found no room
            error = self._hooks.outside()
        death = Death(spec.name, process.id, ended.returncode, ended.time, spec.log, error, defect, ended.lost)
        if self._outcome is None:
            # an unrequested death, or the end of a trainer process that was killed because of one
            spec = child.spec
            if spec.kind in LEADERS and death.returncode == 0 and self._hooks.finished():
                self._end(TrialOutcome("done", f"{spec.name} finished"))
            elif spec.on_death == "end" or (spec.kind == NAME_STORE and death.lost):
                # The address of another machine's etcd would be a new one, which no running process knows.
                self._deaths.append(death)
                self._end(TrialOutcome("failed", f"{spec.name} {death.how}", no_machine=bool(death.lost)))
            elif spec.on_death == "restart":
                self._restart_alone(child, death, time.monotonic() - process.started)
            else:
                self._trainer.add_death(death)
                if not self._trainer.running:
                    self._restart_trainer()
        elif death.killed and not self._stop.killing and not self._trainer.killed(child, death):
            # Killed from outside: other processes may have failed because of it, and been noticed first.
            self._deaths.append(death)
        self._changes.note()

    def _restart_alone(self, child: Child, death: Death, ran_s: float) -> None:
        """Restart a process, with all parts of its server if that spans nodes: they end and start together."""
        parts = [each for each in self._of_kind(child.spec.kind) if each.spec.index == child.spec.index]
        first, ran_s = self._first_deaths.setdefault(parts[0].spec.name, (death, ran_s))
        for part in parts:
            part.kill()
        if any(part.process is not None for part in parts):
            return
        del self._first_deaths[parts[0].spec.name]
        alike, now = _whole(self._of_kind(child.spec.kind)), time.monotonic()
        others_s = [now - other.process.started for other in alike if other.process is not None]
        spare = child.spec.kind in _REPLACEABLE and is_spare(ran_s, others_s, len(alike), self._bounds.min_share)
        if decided := self._decide(parts[0].spec.name, [first], frozenset({first.process}), ran_s, spare=spare):
            restart, cause = decided
            for part in parts:
                part.pending = asyncio.get_running_loop().call_later(restart.delay_s, self._restart, part)
            self._say_restart(cause, restart)

    def _restart_trainer(self) -> None:
        trainer = self._trainer
        checkpoint = self._hooks.checkpoint()
        if decided := self._decide("trainer", trainer.take_deaths(), trainer.processes, trainer.ran_s, checkpoint):
            restart, cause = decided
            trainer.later(restart.delay_s, self._start_trainer)
            self._say_restart(cause, restart, " of the trainer", f", {self._hooks.goes_on(checkpoint)}")

    @_from_the_loop
    def _start_trainer(self) -> None:
        if self._lacks_room():
            self._trainer.later(_ROOM_POLL_S, self._start_trainer)
            return
        self._trainer.starts += 1
        for child in self._trainer.children:
            self._start(child)
        self._trainer.mark_complete()

    def _decide(
        self,
        who: str,
        deaths: list[Death],
        processes: frozenset[ProcessId],
        ran_s: float,
        checkpoint: int = NO_CHECKPOINT,
        *,
        spare: bool = False,
    ) -> tuple[Restart, Cause] | None:
        """Ask the policy. Returns the restart to make and the cause; None without a restart."""
        errors = [error for error in self._hooks.errors() if process_of(error) in processes]
        logs = {child.spec.name: child.spec.log for child in self._children}
        cause = first_cause(deaths, errors, lambda name: logs.get(name, deaths[0].log))
        assert cause is not None
        permanent = any(error.permanent or error.exit_code == _BAD_INPUT for error in errors)
        decision = self._policy.decide(Failure(who, deaths, processes, ran_s, cause, permanent, checkpoint, spare))
        if isinstance(decision, GiveUp):
            self._given_up.append(who)
            kind = who.partition("/")[0]
            alike = [child.spec.name for child in _whole(self._of_kind(kind))]
            left = len(alike) - len(set(alike) & set(self._given_up))
            goes_on = f"the run continues with {left} of {len(alike)} {_REPLACEABLE[kind]}"
            self._hooks.say(f"{cause}; given up {decision.why}: {goes_on} ({cause.log})", "gave_up", who)
            return None
        if isinstance(decision, EndDecision):
            self._deaths += decision.deaths
            self._end(TrialOutcome("failed", decision.reason))
            return None
        death = next((death for death in deaths if death.process == cause.process), deaths[0])
        self._restarted.append(death)
        if FULL in cause.problem:
            self._full = self._full or death
        return decision, cause

    def _of_kind(self, kind: str) -> list[Child]:
        return [c for c in self._children if c.spec.kind == kind]

    def _say_restart(self, cause: Cause, restart: Restart, of: str = "", start: str = "") -> None:
        number = f"restart {restart.number}/{self._bounds.max_restarts}{of} in {restart.delay_s:.1f} s"
        self._hooks.say(f"{cause}; {number}{start} ({cause.log})", "restart", cause.name)

    def _end(self, outcome: TrialOutcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._changes.note()


def _whole(children: Sequence[Child]) -> list[Child]:
    """Return one child for each worker: of a server that spans nodes, its first part."""
    return [child for child in children if not child.spec.node_rank]


# ---- stops the processes of a trial
#
#     MasterWorker (takes a checkpoint while the ModelWorkers still answer; the wait lasts as long as it makes progress)
#       ──SIGTERM──> all others ──SIGTERM──> the name store ──SIGKILL──> every descendant, on every node
#
# Processes that are left after ``stop_timeout_s`` get SIGKILL with their group.


_KILL_TIMEOUT_S = 2.0
_LOOK_S = 0.5  # seconds between two looks at the progress of a stop
_FIRST_PROGRESS = 0.6  # share of stop_timeout_s; the MasterWorker gives up after half of it


class Changes:
    """Wakes those who wait when a process has ended, or when the run has to end."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        """Make all waits check their conditions."""
        self._event.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Check the condition at each change, until it holds or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._event.clear()
                    await self._event.wait()


class StopSequence:
    """The end of all processes, on all nodes."""

    def __init__(
        self, children: Sequence[Child], bounds: Bounds, hooks: Hooks, changes: Changes, nodes: Sequence[SupervisedNode]
    ) -> None:
        self.hurry = False  # after a second signal: no orderly stop
        self.killing = False
        self._children = children
        self._bounds = bounds
        self._hooks = hooks
        self._changes = changes
        self._nodes = nodes

    async def run(self, *, orderly: bool) -> list[str]:
        """Stop every process; ``orderly``: the MasterWorker first. Returns the names of those that had to be killed."""
        workers = [child for child in self._children if child.spec.kind != NAME_STORE]
        for child in self._children:
            child.cancel()
        if orderly:
            await self._stop_master()
        began = time.monotonic()
        for child in workers:
            child.terminate()
        left = self._bounds.stop_timeout_s - (time.monotonic() - began)
        await self._changes.until(lambda: self.hurry or not pids_of(workers), left)
        self.killing = True
        killed = await self._kill(workers)
        left = self._bounds.stop_timeout_s + _KILL_TIMEOUT_S - (time.monotonic() - began)
        stores = [child for child in self._children if child.spec.kind == NAME_STORE]
        for child in stores:
            child.terminate()
        await self._changes.until(lambda: self.hurry or not pids_of(stores), left)
        killed += await self._kill(stores)
        ends = await asyncio.gather(*(node.end(_KILL_TIMEOUT_S) for node in self._nodes))
        killed += [name for left_over in ends for name in left_over]
        await self._changes.until(lambda: not pids_of(self._children), _KILL_TIMEOUT_S)  # killed, but not yet reaped
        if killed:
            names = ", ".join(killed)
            self._hooks.say(f"killed, because they did not stop within {self._bounds.stop_timeout_s:g} s: {names}")
        return killed

    async def _stop_master(self) -> None:
        """Stop the MasterWorker first: it needs every ModelWorker for its checkpoint. Skipped if one is missing."""
        trainer = [child for child in self._children if child.spec.on_training_side]
        if not trainer or len(pids_of(trainer)) < len(trainer):
            return
        for child in trainer:
            if child.spec.kind == "master_worker":
                child.terminate()
        await self._while_it_progresses(lambda: self.hurry or len(pids_of(trainer)) < len(trainer))

    async def _while_it_progresses(self, ended: Callable[[], bool]) -> None:
        """Return when ``ended`` holds, or ``stop_progress_s`` after the last progress. Reports the progress.

        The first progress must come soon: the trainer answers a stop immediately, also in the middle of a step.
        """
        before, moved, bound_s = ("", 0), time.monotonic(), _FIRST_PROGRESS * self._bounds.stop_timeout_s
        while not ended() and time.monotonic() < moved + bound_s:
            await self._changes.until(ended, min(_LOOK_S, bound_s))
            now = self._hooks.stopping()
            text = now[0].partition("\n")[0]
            if text and text != before[0].partition("\n")[0]:
                self._hooks.say(f"{text} (a second Ctrl-C ends the run without waiting)")
            if now != before:
                before, moved, bound_s = now, time.monotonic(), self._bounds.stop_progress_s

    async def _kill(self, children: Sequence[Child]) -> list[str]:
        """Kill the children that still run; returns their names."""
        killed = list(pids_of(children))
        for child in children:
            child.kill()
        await self._changes.until(lambda: not pids_of(children), _KILL_TIMEOUT_S)
        return killed


def pids_of(children: Iterable[Child]) -> dict[str, int]:
    """Return name -> pid of those that run."""
    return {child.spec.name: child.process.pid for child in children if child.process is not None}


# ---- the trainer as the supervisor sees it: ModelWorkers and MasterWorker, which end and restart together
#
# running ──first death──> _LAST_WORDS_S for the others ──> killed ──last one gone──> (supervisor decides) ──> running


_LAST_WORDS_S = 2.0  # time for the peers of a failed process to report: the cause may be theirs


class TrainerProcesses:
    """Processes of a trainer that restarts; none if the death of one ends the run."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self.starts = 1
        self.deaths: list[Death] = []  # since it was last complete
        self._complete: list[Process] = []  # its processes, when it was last complete
        self._killed = False
        self._timer: asyncio.TimerHandle | None = None  # the kill, or the next start

    @property
    def running(self) -> bool:
        return any(child.process is not None for child in self.children)

    @property
    def processes(self) -> frozenset[ProcessId]:
        """Its processes, when it was last complete."""
        return frozenset(process.id for process in self._complete)

    @property
    def ran_s(self) -> float:
        """Seconds since its last start."""
        return time.monotonic() - min((process.started for process in self._complete), default=time.monotonic())

    def killed(self, child: Child, death: Death) -> bool:
        """Return True if this death is the trainer's own kill."""
        return self._killed and death.killed and not death.lost and child in self.children

    def add_death(self, death: Death) -> None:
        """Count a death, unless it is the trainer's own kill; after the first one, kill the others soon."""
        if self._killed:
            self.deaths += [] if death.killed and not death.lost else [death]
            return
        self.deaths.append(death)
        if len(self.deaths) == 1:
            # A killed process was not failed by a peer, so there are no last words to wait for.
            self.later(0.0 if death.killed else _LAST_WORDS_S, self._kill)

    def take_deaths(self) -> list[Death]:
        """Return the deaths since it was last complete, and forget them."""
        self.cancel()
        deaths, self.deaths = self.deaths, []
        self._killed = False
        return deaths

    def mark_complete(self) -> None:
        """Note the processes after a start."""
        self._complete = [child.process for child in self.children if child.process is not None]

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` on the event loop after ``delay_s``, unless ``cancel`` is called before."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def cancel(self) -> None:
        """Cancel the next kill or start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _kill(self) -> None:
        self._killed = True
        for child in self.children:
            child.kill()


# ---- one process of the plan over its restarts: its node, its next start


OnChildExit = Callable[["Child", Process, Exit], None]


class Child:
    """A process of the plan. ``process`` is None while it is not running."""

    def __init__(self, spec: ProcessSpec, node: SupervisedNode) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.pending: asyncio.TimerHandle | None = None  # the next start
        self._node = node
        self._starts = 0

    def start(self, env: Mapping[str, str], log_bytes: int, on_exit: OnChildExit) -> None:
        """Start the process. ``on_exit`` is called when it has ended, also if it could not be started."""
        spec = self.spec
        self.pending = None
        keep = self._starts == 1  # the first restart
        self._starts += 1
        order = ProcessOrder(spec.argv, {**spec.env, **env}, spec.log, log_bytes, keep, spec.gpus, spec.addresses)
        self.process = self._node.start(order, functools.partial(self._end, on_exit))

    def _end(self, on_exit: OnChildExit, ended: Exit) -> None:
        assert self.process is not None
        process, self.process = self.process, None
        on_exit(self, process, ended)

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it is running."""
        if self.process is not None:
            self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, if it is running."""
        if self.process is not None:
            self.process.kill()

    def cancel(self) -> None:
        """Cancel the next start."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None


# ---- bounds of a run, and what the supervisor calls outside of itself


class Say(Protocol):
    """Takes a line for the user; ``kind`` and ``process`` are those of its event (realsys.observe.step_log)."""

    def __call__(self, text: str, kind: EventKind = "note", process: str = "") -> None: ...


async def _ready(_: ProcessSpec, __: str) -> None:
    return None


async def _no_launcher() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a run.

    stop_progress_s  time that a stop waits for the next progress of the MasterWorker
    min_share        share of the workers of a kind that must be left when one is given up
    join_s           time that the start waits for the agents of other nodes
    log_bytes        bound on the log of a process
    room_s           time that restarts wait for room on a full disk: a person or a cleaning job may make some, but
                     the GPUs are idle until then
    """

    stop_timeout_s: float
    stop_progress_s: float
    max_restarts: int
    first_backoff_s: float = 0.5
    min_share: float = 0.0
    join_s: float = 120.0
    log_bytes: int = 1 << 24
    room_s: float = 600.0


def _from_step(step: int) -> str:
    return "from the beginning" if step == NO_CHECKPOINT else f"from step {step}"


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the run that the supervisor calls.

    say               takes a line for each restart and kill
    launch            starts the agents of other nodes
    errors            returns the error files of the trial's processes
    checkpoint        returns the step of the newest complete one, or NO_CHECKPOINT; of a service, a number that grows
    goes_on           says where a trainer that starts again goes on, from what ``checkpoint`` returned
    finished          returns True if a MasterWorker that exited 0 has finished the run
    name_store_ready  returns when the run's own name store answers; takes its process, and the address of its node
    outside           returns a cause outside of the processes, such as a full disk, or ""
    no_room           returns that the disk has no room for a step, or ""
    stopping          returns the progress of a stop: what the MasterWorker does (the user reads its first line), and
                      the bytes that were written
    """

    say: Say
    launch: Callable[[], Awaitable[None]] = _no_launcher
    errors: Callable[[], Sequence[ErrorRecord]] = lambda: ()
    checkpoint: Callable[[], int] = lambda: NO_CHECKPOINT
    goes_on: Callable[[int], str] = _from_step
    finished: Callable[[], bool] = lambda: True
    name_store_ready: Callable[[ProcessSpec, str], Awaitable[None]] = _ready
    outside: Callable[[], str] = lambda: ""
    no_room: Callable[[], str] = lambda: ""
    stopping: Callable[[], tuple[str, int]] = lambda: ("", 0)

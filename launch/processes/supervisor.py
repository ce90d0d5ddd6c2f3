"""Starts the processes of a trial, restarts those that may be restarted, stops all of them.

    consumes     ProcessSpecs
    waits for    the exit of any child (a pidfd each, on the event loop), SIGINT/SIGTERM/SIGHUP
    ends when    the MasterWorker has finished and exits 0 (done), a death ends the run or a restart budget is spent
                 (failed), or a signal arrives (interrupted)
    leaves       no process: every child leads its own session, and the launcher is the subreaper of all descendants

An exception in the launcher fails the run like any other: all processes are stopped and the error is reported.

restart_policy.py decides what a death means. The trainer (ModelWorkers and MasterWorker) ends as a whole: if one of its
processes dies, the others are killed, and then all are started together. stop.py ends the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec

from realsys.cluster.child_process import child_pids, reap_orphans
from realsys.cluster.prctl import subreaper
from realsys.cluster.process import TRAINING_START
from realsys.errors import RealsysError
from realsys.launch.plan import NAME_STORE, ProcessSpec
from realsys.launch.processes.children import Child
from realsys.launch.processes.failures import first_cause, last_error, log_since
from realsys.launch.processes.hooks import Bounds, Hooks
from realsys.launch.processes.restart_policy import (
    NO_CHECKPOINT,
    Cause,
    Death,
    End,
    Failure,
    GiveUp,
    Outcome,
    Restart,
    RestartPolicy,
    is_spare,
)
from realsys.launch.processes.stop import Changes, Stop, pids_of
from realsys.launch.processes.trainer import Trainer

log = logging.getLogger(__name__)

P = ParamSpec("P")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPLACEABLE = {"generation_server": "generation servers", "rollout_worker": "RolloutWorkers"}
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

    def __init__(self, specs: Sequence[ProcessSpec], bounds: Bounds, hooks: Hooks, inherit: Sequence[int] = ()) -> None:
        """``inherit``: descriptors that every child keeps open."""
        self._bounds = bounds
        self._hooks = hooks
        self._inherit = tuple(inherit)
        self._children = [Child(spec) for spec in specs]
        self._trainer = Trainer([child for child in self._children if child.spec.on_death == "restart_training"])
        self._policy = RestartPolicy(bounds.max_restarts, bounds.first_backoff_s)
        self._earlier = child_pids()  # not ours to kill
        self._outcome: Outcome | None = None
        self._deaths: list[Death] = []
        self._restarted: list[Death] = []
        self._given_up: list[str] = []
        self._changes = Changes()
        self._stop = Stop(self._children, bounds, hooks, self._changes, self._earlier)

    @property
    def restarts(self) -> int:
        return len(self._restarted)

    def running(self) -> dict[str, int]:
        """Return name -> pid of the processes that run."""
        return pids_of(self._children)

    async def run(self) -> Outcome:
        """Start everything, wait for the end of the run, stop everything."""
        with subreaper(), _stop_signals(self.interrupt):
            try:
                await self._start_all()
                await self._changes.until(lambda: self._outcome is not None)
            except Exception as exc:
                self.fail(exc)
            finally:
                killed = await self._end_all()
        assert self._outcome is not None
        outcome = self._outcome
        outcome.deaths = self._deaths
        outcome.restarted = self._restarted
        outcome.given_up = self._given_up
        outcome.recovered = self._policy.recovered
        outcome.killed = killed
        return outcome

    def interrupt(self, signum: int) -> None:
        """End the run as a signal does; the second call kills what still runs."""
        if self._outcome is not None:
            self._stop.hurry = True
            self._changes.note()
            return
        self._end(Outcome("interrupted", f"stopped by {signal.Signals(signum).name}", signal=signum))

    def fail(self, exc: Exception) -> None:
        """End the run for an exception in the launcher itself."""
        log.error("the launcher failed", exc_info=exc)
        self._end(Outcome("failed", f"the launcher failed: {type(exc).__name__}: {exc}"))

    async def _end_all(self) -> list[str]:
        self._end(Outcome("failed", "the launcher was cancelled"))  # unless it has ended otherwise
        assert self._outcome is not None
        self._deaths += self._trainer.deaths  # it was being killed: its failures are causes, too
        self._trainer.cancel()
        return await self._stop.run(orderly=self._outcome.status == "interrupted")

    # ---- start

    async def _start_all(self) -> None:
        for child in self._children:
            self._start(child)
            if child.spec.kind == NAME_STORE:
                await self._wait_for_name_store(child.spec)
        self._trainer.mark_complete()

    async def _wait_for_name_store(self, spec: ProcessSpec) -> None:
        """Return when it answers, or when the run ends before that."""
        ready = asyncio.ensure_future(self._hooks.name_store_ready(spec))
        ready.add_done_callback(lambda _: self._changes.note())
        try:
            await self._changes.until(lambda: ready.done() or self._outcome is not None)
            if self._outcome is None:
                ready.result()
        except RealsysError as error:
            self._end(Outcome("failed", f"{spec.name}: {error}"))
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    @_from_the_loop
    def _start(self, child: Child) -> None:
        child.pending = None
        if self._outcome is not None:
            return
        env = {TRAINING_START: str(self._trainer.starts)} if child.spec.on_training_side else {}
        try:
            child.start(env, self._inherit, self._on_exit)
        except OSError as exc:
            self._end(Outcome("failed", f"{child.spec.name} cannot be started: {exc}"))

    # ---- deaths

    @_from_the_loop
    def _on_exit(self, child: Child) -> None:
        pid, returncode = child.reap()
        reap_orphans(self._earlier.union(self.running().values()))
        # No error for a signal: the log does not hold its cause.
        failed = self._outcome is None and returncode > 0
        error, defect = last_error(log_since(child.spec.log, child.log_start)) if failed else ("", ())
        if failed and not error:  # its last words may have found no room
            error = self._hooks.outside()
        death = Death(child.spec.name, pid, returncode, time.time(), child.spec.log, error, defect)
        if self._outcome is None:
            self._consider(child, death)
        elif death.killed and not self._stop.killing and not self._trainer.killed(child, death):
            # Killed from outside: other processes may have failed because of it, and been noticed first.
            self._deaths.append(death)
        self._changes.note()

    def _consider(self, child: Child, death: Death) -> None:
        """Act on an unrequested death, or on the end of a trainer process that was killed because of one."""
        spec = child.spec
        if spec.kind == "master_worker" and death.returncode == 0 and self._hooks.finished():
            self._end(Outcome("done", "the MasterWorker finished"))
        elif spec.on_death == "end":
            self._deaths.append(death)
            self._end(Outcome("failed", f"{spec.name} {death.how}"))
        elif spec.on_death == "restart":
            ran_s = time.monotonic() - child.started
            spare = self._is_spare(child, ran_s)
            if decided := self._decide(death.name, [death], frozenset({death.pid}), ran_s, spare=spare):
                restart, cause = decided
                child.pending = asyncio.get_running_loop().call_later(restart.delay_s, self._start, child)
                self._say_restart(cause, restart)
        else:
            self._trainer.add_death(death)
            if not self._trainer.running:
                self._restart_trainer()

    def _restart_trainer(self) -> None:
        trainer = self._trainer
        checkpoint = self._hooks.checkpoint()
        if decided := self._decide("trainer", trainer.take_deaths(), trainer.pids, trainer.ran_s, checkpoint):
            restart, cause = decided
            trainer.later(restart.delay_s, self._start_trainer)
            start = "from the beginning" if checkpoint == NO_CHECKPOINT else f"from step {checkpoint}"
            self._say_restart(cause, restart, " of the trainer", f", {start}")

    @_from_the_loop
    def _start_trainer(self) -> None:
        self._trainer.starts += 1
        for child in self._trainer.children:
            self._start(child)
        self._trainer.mark_complete()

    def _decide(
        self,
        who: str,
        deaths: list[Death],
        pids: frozenset[int],
        ran_s: float,
        checkpoint: int = NO_CHECKPOINT,
        *,
        spare: bool = False,
    ) -> tuple[Restart, Cause] | None:
        """Ask the policy. Returns the restart to make and the cause; None if there is none to make."""
        errors = [error for error in self._hooks.errors() if error.pid in pids]
        logs = {child.spec.name: child.spec.log for child in self._children}
        cause = first_cause(deaths, errors, lambda name: logs.get(name, deaths[0].log))
        assert cause is not None
        permanent = any(error.permanent or error.exit_code == _BAD_INPUT for error in errors)
        decision = self._policy.decide(Failure(who, deaths, pids, ran_s, cause, permanent, checkpoint, spare))
        if isinstance(decision, GiveUp):
            self._give_up(who, cause, decision)
            return None
        if isinstance(decision, End):
            self._deaths += decision.deaths
            self._end(Outcome("failed", decision.reason))
            return None
        self._restarted.append(next((death for death in deaths if death.pid == cause.pid), deaths[0]))
        return decision, cause

    def _of_kind(self, kind: str) -> list[Child]:
        return [c for c in self._children if c.spec.kind == kind]

    def _is_spare(self, child: Child, ran_s: float) -> bool:
        """Return True if the run can do without this worker, which has just ended."""
        alike, now = self._of_kind(child.spec.kind), time.monotonic()
        others_s = [now - other.started for other in alike if other.process is not None]
        return child.spec.kind in _REPLACEABLE and is_spare(ran_s, others_s, len(alike), self._bounds.min_share)

    def _give_up(self, name: str, cause: Cause, decision: GiveUp) -> None:
        self._given_up.append(name)
        kind = name.partition("/")[0]
        alike = [child.spec.name for child in self._of_kind(kind)]
        left = len(alike) - len(set(alike) & set(self._given_up))
        goes_on = f"the run continues with {left} of {len(alike)} {_REPLACEABLE[kind]}"
        self._hooks.say(f"{cause}; given up {decision.why}: {goes_on} ({cause.log})")

    def _say_restart(self, cause: Cause, restart: Restart, of: str = "", start: str = "") -> None:
        number = f"restart {restart.number}/{self._bounds.max_restarts}{of} in {restart.delay_s:.1f} s"
        self._hooks.say(f"{cause}; {number}{start} ({cause.log})")

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._changes.note()


@contextlib.contextmanager
def _stop_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` on the event loop for each stop signal inside the block."""
    loop = asyncio.get_running_loop()
    # nohup means that SIGHUP does not end the run. SIGINT counts even if it was ignored before: a shell that starts a
    # command in the background does that, and who sends a SIGINT to such a run wants to stop it.
    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [signum for signum in _STOP_SIGNALS if not (signum == signal.SIGHUP and hangup_ignored)]
    for signum in taken:
        loop.add_signal_handler(signum, handle, signum)
    try:
        yield
    finally:
        for signum in taken:
            loop.remove_signal_handler(signum)

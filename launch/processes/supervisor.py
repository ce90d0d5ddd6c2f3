"""Starts the processes of a trial, restarts what may be restarted, stops all of them.

    consumes     ProcessSpecs
    waits for    the exit of any child (a pidfd each, on the event loop), SIGINT/SIGTERM/SIGHUP
    ends when    the MasterWorker has finished and exits 0 (done), a death ends the run or a restart budget is spent
                 (failed), or a signal arrives (interrupted)
    leaves       no process: every child leads a session of its own, and the launcher is the subreaper of them all

An exception in here is a failed run like any other: everything is stopped, and it is said.

What a death means is decided in verdict.py. The training side (ModelWorkers and MasterWorker) is lost as a whole: the
others of it are killed, and when all are gone they are started again together.

An interrupted run stops its MasterWorker first, which takes a checkpoint while the ModelWorkers still answer; then all
others get SIGTERM, and the name store last. What is left after ``stop_timeout_s`` gets SIGKILL with its whole group,
and so does any descendant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec

from realsys.cluster.process import TRAINING_START
from realsys.errors import RealsysError
from realsys.launch.plan import NAME_STORE, ProcessSpec
from realsys.launch.processes.children import Child, Descendants, subreaper
from realsys.launch.processes.verdict import NO_CHECKPOINT, Death, End, Judge, Loss, Outcome

log = logging.getLogger(__name__)

P = ParamSpec("P")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_BACKOFF_S = 0.5
_KILL_TIMEOUT_S = 2.0
_LAST_WORDS_S = 2.0  # what the peers of a failed process get to say why: the cause may be one of theirs
_SIDE = "the training side"


async def _at_once(_: ProcessSpec) -> None:
    return None


Called = Callable[Concatenate["Supervisor", P], None]


def _from_the_loop(method: Called[P]) -> Called[P]:
    """For what the event loop calls: it would log an exception and go on, with a process missing that nobody starts."""

    def guarded(supervisor: Supervisor, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(supervisor, *args, **kwargs)
        except Exception as exc:
            supervisor.fail(exc)

    return guarded


class Supervisor:
    """Owns the child processes of one trial from start to end."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        stop_timeout_s: float,
        master_stop_s: float,
        max_restarts: int,
        say: Callable[[str], None],
        permanent: Callable[[frozenset[int]], bool] = lambda pids: False,
        checkpoint: Callable[[], int] = lambda: NO_CHECKPOINT,
        finished: Callable[[], bool] = lambda: True,
        name_store_ready: Callable[[ProcessSpec], Awaitable[None]] = _at_once,
        inherit: Sequence[int] = (),
        first_backoff_s: float = _FIRST_BACKOFF_S,
    ) -> None:
        """``say`` gets a line per restart and kill; ``inherit``: descriptors that every child keeps open.

        ``permanent``: whether one of these processes failed in a way that would come again. ``checkpoint``: step of the
        newest complete one, or NO_CHECKPOINT. ``finished``: whether a MasterWorker that exits 0 says so itself.
        ``name_store_ready`` returns when the name store of this run's own answers. The MasterWorker has
        ``master_stop_s`` of ``stop_timeout_s`` for itself.
        """
        self._children = [Child(spec) for spec in specs]
        self._side = [child for child in self._children if child.spec.on_death == "restart_training"]
        self._stop_timeout_s, self._master_stop_s = stop_timeout_s, master_stop_s
        self._say = say
        self._permanent, self._checkpoint, self._finished = permanent, checkpoint, finished
        self._name_store_ready = name_store_ready
        self._inherit = tuple(inherit)
        self._descendants = Descendants()
        self._judge = Judge(max_restarts, first_backoff_s)
        self._max_restarts = max_restarts
        self._outcome: Outcome | None = None
        self._deaths: list[Death] = []
        self._restarted: list[Death] = []
        self._side_deaths: list[Death] = []  # since it was last whole
        self._side_pids: frozenset[int] = frozenset()  # when it was last whole
        self._side_starts = 1
        self._side_timer: asyncio.TimerHandle | None = None  # its kill, or its next start
        self._side_killed = False
        self._changed = asyncio.Event()  # a process has ended, or the run is to
        self._hurry = False  # a second signal: do not wait for an orderly stop
        self._killing = False

    @property
    def restarts(self) -> int:
        return len(self._restarted)

    def running(self) -> dict[str, int]:
        """Name -> pid of the processes that are up."""
        return {c.spec.name: c.process.pid for c in self._children if c.process is not None}

    async def run(self) -> Outcome:
        """Start everything, wait for the end of the run, stop everything."""
        with subreaper(), self._signals():
            try:
                await self._start_all()
                await self._until(lambda: self._outcome is not None)
            except Exception as exc:
                self.fail(exc)
            finally:
                killed = await self._stop()
        assert self._outcome is not None
        outcome = self._outcome
        outcome.deaths, outcome.restarted, outcome.mended = self._deaths, self._restarted, self._judge.mended
        outcome.killed = killed
        return outcome

    def interrupt(self, signum: int) -> None:
        """End the run as a signal does; the second call stops it the hard way."""
        if self._outcome is not None:
            self._hurry = True
            self._changed.set()
            return
        self._end(Outcome("interrupted", f"stopped by {signal.Signals(signum).name}", signal=signum))

    def fail(self, exc: Exception) -> None:
        """End the run for an exception in the launcher itself."""
        log.error("the launcher failed", exc_info=exc)
        self._end(Outcome("failed", f"the launcher failed: {type(exc).__name__}: {exc}"))

    # ---- start

    async def _start_all(self) -> None:
        for child in self._children:
            self._start(child)
            if child.spec.kind == NAME_STORE:
                await self._wait_for_name_store(child.spec)
        self._side_pids = self._pids(self._side)

    async def _wait_for_name_store(self, spec: ProcessSpec) -> None:
        """Until it answers, or the run ends before."""
        ready = asyncio.ensure_future(self._name_store_ready(spec))
        ready.add_done_callback(lambda _: self._changed.set())
        try:
            await self._until(lambda: ready.done() or self._outcome is not None)
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
        env = {TRAINING_START: str(self._side_starts)} if child.spec.on_training_side else {}
        try:
            child.start(env, self._inherit, self._on_exit)
        except OSError as exc:
            self._end(Outcome("failed", f"{child.spec.name} cannot be started: {exc}"))

    # ---- deaths

    @_from_the_loop
    def _on_exit(self, child: Child) -> None:
        pid, returncode = child.reap()
        self._descendants.reap_orphans(list(self.running().values()))
        death = Death(child.spec.name, pid, returncode, time.time(), child.spec.log)
        if self._outcome is None:
            self._consider(child, death)
        elif death.killed and not self._killing and not (self._side_killed and child.spec.on_training_side):
            self._deaths.append(death)  # not by us: others may have ended because of it, and been noticed first
        self._changed.set()

    def _consider(self, child: Child, death: Death) -> None:
        """A death nobody asked for, or one of the training side that is being taken down."""
        spec = child.spec
        if spec.kind == "master_worker" and death.returncode == 0 and self._finished():
            self._end(Outcome("done", "the MasterWorker finished"))
        elif spec.on_death == "end":
            self._deaths.append(death)
            self._end(Outcome("failed", f"{spec.name} {death.how}"))
        elif spec.on_death == "restart":
            self._restart_one(child, death)
        else:
            self._lose_side(death)

    def _restart_one(self, child: Child, death: Death) -> None:
        pids = frozenset({death.pid})
        ran_s = time.monotonic() - child.started
        verdict = self._judge.judge(Loss(death.name, [death], pids, ran_s, self._permanent(pids)))
        if isinstance(verdict, End):
            self._give_up(verdict)
            return
        self._restarted.append(death)
        child.pending = asyncio.get_running_loop().call_later(verdict.delay_s, self._start, child)
        times = f"restart {verdict.number}/{self._max_restarts} in {verdict.delay_s:.1f} s"
        self._say(f"{death.name} {death.how}; {times} ({death.log})")

    def _lose_side(self, death: Death) -> None:
        if not self._side_killed or not death.killed:
            self._side_deaths.append(death)
        if len(self._side_deaths) == 1 and not self._side_killed:
            grace = 0.0 if death.killed else _LAST_WORDS_S
            self._side_timer = asyncio.get_running_loop().call_later(grace, self._kill_side)
        if not self._pids(self._side):
            self._restart_side()

    @_from_the_loop
    def _kill_side(self) -> None:
        self._side_killed = True
        for child in self._side:
            child.kill()

    def _restart_side(self) -> None:
        """All of it is gone."""
        self._cancel_side()
        deaths, self._side_deaths, self._side_killed = self._side_deaths, [], False
        ran_s = time.monotonic() - min(child.started for child in self._side)
        pids = self._side_pids
        checkpoint = self._checkpoint()
        verdict = self._judge.judge(Loss(_SIDE, deaths, pids, ran_s, self._permanent(pids), checkpoint))
        if isinstance(verdict, End):
            self._give_up(verdict)
            return
        self._restarted.append(verdict.cause)
        self._side_timer = asyncio.get_running_loop().call_later(verdict.delay_s, self._start_side)
        cause = verdict.cause
        start = "from the beginning" if checkpoint == NO_CHECKPOINT else f"from step {checkpoint}"
        times = f"restart {verdict.number}/{self._max_restarts} of the training side in {verdict.delay_s:.1f} s"
        self._say(f"{cause.name} {cause.how}; {times}, {start} ({cause.log})")

    @_from_the_loop
    def _start_side(self) -> None:
        self._side_timer = None
        self._side_starts += 1
        for child in self._side:
            self._start(child)
        self._side_pids = self._pids(self._side)

    def _cancel_side(self) -> None:
        if self._side_timer is not None:
            self._side_timer.cancel()
            self._side_timer = None

    def _give_up(self, verdict: End) -> None:
        self._deaths += verdict.deaths
        self._end(Outcome("failed", verdict.reason))

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._changed.set()

    # ---- the end

    async def _stop(self) -> list[str]:
        """Stop every process; returns the names of those that had to be killed."""
        self._end(Outcome("failed", "the launcher was cancelled"))  # unless it has ended otherwise
        assert self._outcome is not None
        began = time.monotonic()
        if self._side_deaths:  # it was being taken down: what it said last counts
            self._deaths += self._side_deaths
        self._cancel_side()
        workers = [child for child in self._children if child.spec.kind != NAME_STORE]
        for child in self._children:
            child.cancel()
        if self._outcome.status == "interrupted":
            await self._stop_master()
        for child in workers:
            child.terminate()
        left = self._stop_timeout_s - (time.monotonic() - began)
        await self._until(lambda: self._hurry or not self._pids(workers), left)
        killed, self._killing = self._names(workers), True
        for child in workers:
            child.kill()
        await self._until(lambda: not self._pids(workers), _KILL_TIMEOUT_S)
        killed += await self._stop_name_store(self._stop_timeout_s + _KILL_TIMEOUT_S - (time.monotonic() - began))
        killed += self._descendants.sweep(_KILL_TIMEOUT_S)
        await self._until(lambda: not self._pids(self._children), _KILL_TIMEOUT_S)  # killed, and not heard of yet
        if killed:
            self._say(f"killed, because they did not stop within {self._stop_timeout_s:g} s: {', '.join(killed)}")
        return killed

    async def _stop_master(self) -> None:
        """It needs every ModelWorker for its checkpoint; without one of them it is not waited for."""
        training = [child for child in self._children if child.spec.on_training_side]
        if not training or len(self._pids(training)) < len(training):
            return
        for child in training:
            if child.spec.kind == "master_worker":
                child.terminate()
        await self._until(lambda: self._hurry or len(self._pids(training)) < len(training), self._master_stop_s)

    async def _stop_name_store(self, timeout_s: float) -> list[str]:
        stores = [child for child in self._children if child.spec.kind == NAME_STORE]
        for child in stores:
            child.terminate()
        await self._until(lambda: self._hurry or not self._pids(stores), timeout_s)
        killed = self._names(stores)
        for child in stores:
            child.kill()
        await self._until(lambda: not self._pids(stores), _KILL_TIMEOUT_S)
        return killed

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Look again whenever a process has ended, until the condition holds or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    @staticmethod
    def _pids(children: Sequence[Child]) -> frozenset[int]:
        return frozenset(child.process.pid for child in children if child.process is not None)

    @staticmethod
    def _names(children: Sequence[Child]) -> list[str]:
        return [child.spec.name for child in children if child.process is not None]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # nohup means that SIGHUP does not end the run. SIGINT counts even where it was ignored: a shell that starts a
        # command in the background does that, and whoever sends one all the same wants the run to stop.
        hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        taken = [signum for signum in _STOP_SIGNALS if not (signum == signal.SIGHUP and hangup_ignored)]
        for signum in taken:
            loop.add_signal_handler(signum, self.interrupt, signum)
        try:
            yield
        finally:
            for signum in taken:
                loop.remove_signal_handler(signum)

"""The launcher's side of the trackers: starts their process, shows its reports, ends it with the run.

    async with Trackers(config, paths, say) as trackers:
        ...                                   # the run
        trackers.status = outcome.status

Nothing here ends or delays a run: a process that cannot be started or that dies is a note, and the end has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import realsys
from realsys.cluster.children.child_process import ChildProcess, how_it_ended, lines_of
from realsys.config.doors import TRACKER
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError

FINISH_S = 10.0  # time that trackers have at the end to deliver what is left: seconds of points, over a network
#: An interrupted run may continue later, and its trackers with it: its stop is not delayed.
INTERRUPTED_FINISH_S = 1.0
_KILL_AFTER_S = 2.0  # beyond the time to finish


class Trackers:
    """The process of the trackers of one run. ``say`` shows a note; it is called on the event loop."""

    def __init__(self, config: Config, paths: TrialPaths, say: Callable[[str], None]) -> None:
        self.status = "failed"  # how the run ended
        self._config = config
        self._paths = paths
        self._say = say
        self._child: ChildProcess | None = None
        self._is_ending = False
        self._has_shown_failure = False
        self._reports: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._config.telemetry.trackers:
            try:
                read, write = os.pipe()
                try:
                    self._child = self._spawn(write)
                except OSError:
                    os.close(read)
                    raise
                finally:
                    os.close(write)
                self._reports = asyncio.create_task(self._watch(self._child, read))
            except OSError as error:
                self._say(f"the trackers cannot be started: {error}: the run goes on without them")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_ending = True
        if (child := self._child) is None:
            return
        finish_s = FINISH_S
        if self.status == "interrupted":
            finish_s = INTERRUPTED_FINISH_S
        assert child.popen.stdin is not None and self._reports is not None
        with contextlib.suppress(OSError), child.popen.stdin as stdin:  # it may have ended
            stdin.write(line(TrialEnded(self.status, finish_s)))
        await child.exits_within(finish_s + _KILL_AFTER_S)
        if not await child.end(_KILL_AFTER_S):
            self._say(f"the process of the trackers, pid {child.pid}, cannot be killed")
            self._reports.cancel()
            return
        code = child.reap()
        # A descendant that left the group may still have the pipe.
        await asyncio.wait([self._reports], timeout=_KILL_AFTER_S)
        self._reports.cancel()
        self._show_failure(code)

    @property
    def _log(self) -> Path:
        return self._paths.logs / "trackers.log"

    def _spawn(self, reports: int) -> ChildProcess:
        """Start the process. Its order is in memory and not in a pipe, whose writer would wait for its reader."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log, os.fdopen(os.memfd_create("order"), "wb") as order:
            order.write(line(self._order()))
            order.flush()
            argv = [sys.executable, "-P", "-m", MODULE, str(order.fileno()), str(reports)]
            inherit = [order.fileno(), reports]
            return ChildProcess(argv, os.environ, log, stdin=subprocess.PIPE, inherit=inherit)

    def _order(self) -> TrackerOrder:
        config, telemetry = self._config, self._config.telemetry
        return TrackerOrder(
            {name: telemetry.tracker_args.get(name, {}) for name in telemetry.trackers},
            str(self._paths.root),
            config.experiment,
            config.trial,
            realsys.__version__,
            os.getpid(),
            config.model_dump(mode="json", exclude={"telemetry": {"tracker_args"}}),  # there may be keys in them
        )

    async def _watch(self, child: ChildProcess, descriptor: int) -> None:
        """Show the reports until the process has ended, and say so if the run goes on."""
        async for text in lines_of(os.fdopen(descriptor, "rb")):
            with contextlib.suppress(msgspec.DecodeError):
                self._say(msgspec.json.decode(text, type=str))
        if not self._is_ending and await child.exits_within(_KILL_AFTER_S):
            self._show_failure(child.reap(), ": the run goes on without trackers")

    def _show_failure(self, code: int, consequence: str = "") -> None:
        """Say how the process ended if that was a failure, once."""
        if code and not self._has_shown_failure:
            self._has_shown_failure = True
            self._say(f"the process of the trackers {how_it_ended(code)} ({self._log}){consequence}")


# ---- messages between the launcher and the process of the trackers
#
#     launcher ──Order──> a file in memory
#              ──Ended──> stdin of the process
#              <──note─── a pipe: stdout and stderr of the process belong to the libraries, and go to a log
#
# A message is one line of JSON.


MODULE = "realsys.observe.trackers.process"
LONGEST_TEXT = 500


class TrackerOrder(msgspec.Struct):
    """Work of the process. ``trackers``: name -> arguments; ``folder``: the trial; ``parent``: pid of the launcher."""

    trackers: dict[str, dict[str, Any]]
    folder: str
    experiment: str
    trial: str
    version: str
    parent: int
    config: dict[str, Any] = {}


class TrialEnded(msgspec.Struct):
    """The run has ended with ``status``. Trackers have ``finish_s`` seconds to finish."""

    status: str
    finish_s: float


def line(message: msgspec.Struct | str) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


# ---- checks the trackers of a run before it starts. Imports their modules, and none of their libraries


FIELD = "telemetry.trackers"


def check_trackers(config: Config) -> None:
    """Raise ConfigError for an unknown tracker, wrong arguments, a package that is not installed, or a missing key."""
    telemetry = config.telemetry
    for name in telemetry.trackers:
        if telemetry.trackers.count(name) > 1:
            raise ConfigError(FIELD, telemetry.trackers, f"names {name!r} twice: remove one of them")
        TRACKER.check(name, telemetry.tracker_args.get(name))
        tracker = TRACKER.load(name)
        if tracker.package and find_spec(tracker.package) is None:
            problem = f"needs the package {tracker.package}: pip install '{tracker.install or tracker.package}'"
            raise ConfigError(FIELD, name, problem)
        with TRACKER.guard(name, "cannot be checked"):
            problem = tracker.problem(telemetry.tracker_args.get(name, {}))
        if problem:
            raise ConfigError(FIELD, name, problem)
    if unused := [name for name in telemetry.tracker_args if name not in telemetry.trackers]:
        problem = f"names {unused[0]!r}, which is not in {FIELD}: add it there, or remove its arguments"
        raise ConfigError("telemetry.tracker_args", telemetry.tracker_args, problem)

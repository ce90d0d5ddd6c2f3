"""One process of the plan over its restarts: its environment, its log, its next start."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from realsys.cluster.child_process import ChildProcess
from realsys.launch.plan import ProcessSpec
from realsys.launch.processes.logs import keep_last_words


class Child:
    """A process of the plan. ``process`` is None while it is not running."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: ChildProcess | None = None
        self.started = 0.0  # monotonic seconds
        self.log_start = 0  # size of the log at the last start, in bytes
        self.pending: asyncio.TimerHandle | None = None  # the next start
        self._starts = 0

    def start(self, env: Mapping[str, str], inherit: Sequence[int], on_exit: Callable[[Child], None]) -> None:
        """Start the process. ``on_exit`` is called on the event loop and must call ``reap``. Raises OSError."""
        spec = self.spec
        self.pending = None
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if self._starts == 1:  # the first restart
            keep_last_words(spec.log)
        self._starts += 1
        with spec.log.open("ab") as log:
            self.log_start = log.tell()
            exited = functools.partial(on_exit, self)
            environment = _environment({**spec.env, **env})
            self.process = ChildProcess(spec.argv, environment, log, inherit=inherit, on_exit=exited)
        self.started = self.process.started

    def reap(self) -> tuple[int, int]:
        """Kill the rest of the group and collect the process. Returns (pid, return code)."""
        assert self.process is not None
        process, self.process = self.process, None
        return process.pid, process.reap()

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


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # A child that finds another parent than this pid knows that the launcher died before it could ask to die with it.
    env = {**os.environ, **extra, "REALSYS_PARENT_PID": str(os.getpid())}
    if "PYTHONPATH" in extra and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join((extra["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return env

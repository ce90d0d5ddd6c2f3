"""Child processes and all that descends from them: started in groups of their own, watched, killed, collected."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from realsys.launch.plan import ProcessSpec
from realsys.launch.processes.logs import keep_last_words

_PR_SET_CHILD_SUBREAPER = 36


class Child:
    """One process of the plan, over its restarts."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0  # monotonic seconds
        self._starts = 0
        self.pending: asyncio.TimerHandle | None = None  # its next start
        self._pidfd = -1

    def start(self, env: Mapping[str, str], inherit: Sequence[int], on_exit: Callable[[Child], None]) -> None:
        """Raises OSError. ``on_exit`` comes on the event loop; ``reap`` then."""
        spec = self.spec
        self.pending = None
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if self._starts == 1:  # the first restart
            keep_last_words(spec.log)
        self._starts += 1
        with spec.log.open("ab") as log:
            self.process = subprocess.Popen(
                spec.argv,
                env=_environment({**spec.env, **env}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(inherit),
                start_new_session=True,  # a group to kill as a whole; Ctrl-C reaches the launcher only
            )
        self.started = time.monotonic()
        try:
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError:  # nobody would hear of its end
            self.kill()
            self.process.wait()
            self.process = None
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, on_exit, self)

    def reap(self) -> tuple[int, int]:
        """After its end: kill the rest of its group; returns (pid, return code)."""
        assert self.process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Before the zombie is reaped its pid, and so the group's id, cannot have been given to anybody else.
        self.kill()
        pid, returncode = self.process.pid, self.process.wait()
        self.process, self._pidfd = None, -1
        return pid, returncode

    def terminate(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)  # Popen's own would reap it

    def kill(self) -> None:
        """SIGKILL to its group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def cancel(self) -> None:
        """No further start."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    # With the pid a child can tell that the launcher died before the child asked to die with it.
    env = {**os.environ, **extra, "REALSYS_PARENT_PID": str(os.getpid())}
    if "PYTHONPATH" in extra and os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join((extra["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return env


class Descendants:
    """What lives below this process, apart from children that were there before."""

    def __init__(self) -> None:
        self._others = {child.pid for child in psutil.Process().children()}

    def sweep(self, timeout_s: float) -> list[str]:
        """Kill those that outlived their parents, wherever they hid (own session, double fork); names what it found."""
        left = [process for process in self._all() if _alive(process)]
        names = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.name()} (pid {process.pid})")
                process.kill()
        psutil.wait_procs(left, timeout=timeout_s)
        self.reap_orphans(())
        return names

    def reap_orphans(self, children: Sequence[int]) -> None:
        """Collect dead processes that were handed to the launcher as subreaper; ``children`` are Popen's business."""
        own = self._others.union(children)
        for process in psutil.Process().children():
            if process.pid not in own and not _alive(process):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _all(self) -> list[psutil.Process]:
        mine = [p for p in psutil.Process().children() if p.pid not in self._others]
        found = list(mine)
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        return found


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Orphaned descendants become children of this process instead of init's, so that none can get lost."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_to(value: int) -> None:
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    set_to(1)
    try:
        yield
    finally:
        set_to(0)

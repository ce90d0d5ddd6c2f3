"""What every worker process does with the operating system: signals, the death of its parent, its log, its end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from realsys.errors import RealsysError

log = logging.getLogger(__name__)

PARENT_PID = "REALSYS_PARENT_PID"  # set by a launcher that is the direct parent
RUN_ID = "REALSYS_RUN_ID"
TRAINING_START = "REALSYS_TRAINING_START"  # number of the training side's start, for its processes
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def configure_logging(worker: str) -> None:
    """Log to stderr, which the launcher sends to a file; dump all stacks there on SIGUSR1 and on a crash."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("REALSYS_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s.%(msecs)03d {worker} %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.captureWarnings(True)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def die_with_parent() -> None:
    """SIGTERM to this process when its parent ends. The kernel means the parent *thread* that started it.

    The parent may have died before this call; a launcher that sets REALSYS_PARENT_PID closes that gap.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise RealsysError(f"cannot ask to die with the parent: {os.strerror(ctypes.get_errno())}")
    expected = os.environ.get(PARENT_PID)
    if expected is not None and expected != str(os.getppid()):
        raise RealsysError(f"the launcher (pid {expected}) has ended already; nothing to work for")


def training_start() -> str:
    """This start of the training side, the same for all its processes: what one before it left must not be found."""
    return "-".join(os.environ.get(name, "0") for name in (RUN_ID, TRAINING_START))


def flush() -> None:
    """Push out what was logged, as far as that works: used just before ``os._exit``."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def exit_within(grace_s: float, code: int, why: str) -> None:
    """From now on this process has ``grace_s`` to end by itself; then it dumps its stacks and ends with ``code``."""

    def expire() -> None:
        threading.Event().wait(grace_s)
        log.error("%s, but still here after %.1f s; stacks of what holds it follow", why, grace_s)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        flush()
        os._exit(code)

    threading.Thread(target=expire, name="exit deadline", daemon=True).start()


def end(code: int, grace_s: float) -> NoReturn:
    """End this process: its exit handlers, which have ``grace_s``, and nothing else.

    Neither waits for threads nor takes the interpreter down: with torch in it that takes seconds, in which whoever is
    to succeed this process waits for nothing.
    """
    exit_within(grace_s, code, "done")
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def bounded(action: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run ``action`` for at most ``timeout_s``: on the way out a dead disk or name store must not hold the process."""
    thread = threading.Thread(target=action, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        log.error("%s did not finish within %.1f s; going on without it", what, timeout_s)


class StopSignals:
    """SIGTERM and SIGINT set ``stop``, any number of times.

    They are taken up by a thread, through a pipe: a handler runs between any two instructions of the main thread, also
    inside ``Event.wait``, where ``Event.set`` would deadlock. The pipe is the wake-up descriptor too, so that a main
    thread that sits in a C function does not delay it.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.orphan_grace_s = 8.0
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._parent = os.getppid()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def install(self) -> None:
        """Only from the main thread."""
        threading.Thread(target=self._take_up, name="signals", daemon=True).start()
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call back when asked to stop, from the signal thread; at once if that was before."""
        with self._lock:
            if not self.stop.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _handle(self, number: int, _frame: object) -> None:
        # Needed beside the wake-up descriptor: an event loop may have put its own in place.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def _take_up(self) -> None:
        """Consumes signal numbers; waits in the pipe for the life of the process."""
        while numbers := os.read(self._reader, 64):
            for number in set(numbers) & {int(n) for n in _STOP_SIGNALS}:
                self._request_stop(signal.Signals(number))

    def _request_stop(self, number: signal.Signals) -> None:
        with self._lock:
            first = not self.stop.is_set()
            self.stop.set()
            callbacks, self._callbacks = self._callbacks, []
        if not first:
            return
        orphaned = os.getppid() != self._parent
        log.info("%s: stopping%s", number.name, "; the parent process has ended" if orphaned else "")
        if orphaned:
            # Nobody is left who would kill a process that does not stop.
            exit_within(self.orphan_grace_s, 1, "asked to stop, without a parent")
        for callback in callbacks:
            callback()

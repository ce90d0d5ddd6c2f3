"""OS integration that all workers share: signals, parent death, logging, exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from realsys.cluster import prctl
from realsys.errors import MALFORMED, RealsysError, WaitTimeout

T = TypeVar("T")

log = logging.getLogger(__name__)

PARENT_PID = "REALSYS_PARENT_PID"  # set by a launcher that is the direct parent
RUN_ID = "REALSYS_RUN_ID"  # set by the launcher: it differs at every start of a trial
TRAINING_START = "REALSYS_TRAINING_START"  # number of the trainer's start, for its processes
STORE_ADDRESS = "REALSYS_NAME_STORE"  # host:port of the trial's own etcd on another machine
NODE_RANK = "REALSYS_NODE_RANK"  # number of this part of a server that spans nodes
NODES = "REALSYS_NODES"  # number of its parts
INIT_ADDRESS = "REALSYS_INIT_ADDRESS"  # host:port at which the parts find each other
#: set where a batch system sends SIGTERM to every process of a job: a worker is stopped by the SIGINT of its agent only
SHIELDED = "REALSYS_SHIELDED"
#: this realsys, also when it runs from a checkout that is not installed
_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
_PARENT_LOOK_S = 0.2  # seconds between two checks of the parent
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHIELDED_LOOKS = 25  # while the parent may be ending


def training_start() -> str:
    """Return which start of the trainer this process belongs to: the same in all of its processes."""
    return f"{os.environ.get(RUN_ID, '')}.{os.environ.get(TRAINING_START, '')}"


def configure_logging(worker: str) -> None:
    """Log to stderr, which the launcher writes to a file; dump all stacks there on SIGUSR1 and on a crash."""
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


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one.

    A RolloutWorker has a connection for each running call, the manager one for each held call: together more than the
    usual soft limit. A process beyond its limit cannot connect, and would take its own trouble for that of a server.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the parent *thread* that started it ends.

    The parent may have died before this call; a launcher that sets REALSYS_PARENT_PID closes that gap.
    """
    expected = os.environ.get(PARENT_PID)
    try:
        alive = prctl.die_with_parent(signal.SIGTERM, None if expected is None else int(expected))
    except OSError as exc:
        raise RealsysError(f"cannot ask to die with the parent: {exc}") from exc
    if not alive:
        raise RealsysError(f"the launcher (pid {expected}) has ended already; nothing to work for")


def own_python_path(python_path: str) -> str:
    """Return a PYTHONPATH with this realsys in front of the user's, and only there."""
    others = [folder for folder in python_path.split(os.pathsep) if folder != _SOURCE_ROOT] if python_path else []
    return os.pathsep.join([_SOURCE_ROOT, *others])


def own_environment(**more: str) -> dict[str, str]:
    """Return the environment in which a child finds this realsys, wherever this process was started, with ``more``."""
    return {**os.environ, "PYTHONPATH": own_python_path(os.environ.get("PYTHONPATH", "")), **more}


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


KEEP_BYTES = 256 << 20  # free memory that is not worth the time of ``trim_heap``: small models stay below
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def trim_heap(keep_bytes: int = KEEP_BYTES) -> bool:
    """Return free pages to the system if more than ``keep_bytes`` are free. Returns True if it did so.

    glibc keeps what is freed, to give it out again: between two steps a rank of a 135M model so held 1.1 GB of its
    backward pass. Does nothing with another C library than glibc 2.33 or newer.
    """
    libc = ctypes.CDLL(None)
    try:
        look, trim = libc.mallinfo2, libc.malloc_trim
    except AttributeError:
        return False
    look.restype = _Mallinfo2
    if look().fordblks <= keep_bytes:
        return False
    return bool(trim(ctypes.c_size_t(0)))


def gpu_peak_bytes() -> int:
    """Return the most memory that torch has held on one GPU of this process; 0 if it uses none."""
    torch: Any = sys.modules.get("torch")  # a process that has not imported it uses no GPU
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return max((int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count())), default=0)


def flush() -> None:
    """Flush stdout and stderr as far as possible. Call it before ``os._exit``, which does not."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def exit_within(grace_s: float, code: int, why: str) -> None:
    """Give this process ``grace_s`` to exit; after that it dumps its stacks and exits with ``code``."""

    def expire() -> None:
        threading.Event().wait(grace_s)
        log.error("%s, but still here after %.1f s; the stacks of all threads follow", why, grace_s)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        flush()
        os._exit(code)

    threading.Thread(target=expire, name="exit deadline", daemon=True).start()


def end(code: int, grace_s: float) -> NoReturn:
    """Run the exit handlers within ``grace_s`` and end this process.

    It neither waits for threads nor shuts the interpreter down: with torch that takes seconds, and the process that
    will replace this one would wait for them.
    """
    exit_within(grace_s, code, "done")
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def bounded(action: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run ``action`` for at most ``timeout_s``: a dead disk or name store must not keep the process from its exit."""
    thread = threading.Thread(target=action, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        log.error("%s did not finish within %.1f s; continuing without it", what, timeout_s)


def on_thread(
    action: Callable[[], T],
    on_stop: Callable[[Callable[[], None]], None],
    timeout_s: float,
    waits_for: Callable[[], str],
) -> T:
    """Return ``action()``, run on a thread, so that the caller can stop while a library waits in C++.

    Raises WaitTimeout, which names ``waits_for()``, after ``timeout_s``, and when ``on_stop`` calls back because the
    process stops. The thread then continues for as long as the library waits.
    """
    ended, result = threading.Event(), Future[T]()

    def run() -> None:
        try:
            result.set_result(action())
        except BaseException as exc:
            result.set_exception(exc)
        ended.set()

    on_stop(ended.set)
    threading.Thread(target=run, name="on_thread", daemon=True).start()
    in_time = ended.wait(timeout_s)
    if result.done():
        return result.result()
    raise WaitTimeout(f"{'stopped while waiting' if in_time else f'waited {timeout_s:g} s'} for {waits_for()}")


class StopSignals:
    """Sets ``stop`` on SIGTERM and SIGINT, any number of times.

    A thread reads the signals from a pipe: a handler runs between any two instructions of the main thread, also inside
    ``Event.wait``, where ``Event.set`` would deadlock. The pipe is the wake-up descriptor too, so a main thread inside
    a C function does not delay it.
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
        """Install the handlers. Call it from the main thread."""
        threading.Thread(target=self._take_up, name="signals", daemon=True).start()
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from the signal thread at the first signal, or now if there was one."""
        with self._lock:
            if not self.stop.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _handle(self, number: int, _frame: object) -> None:
        # The wake-up descriptor is not enough: an event loop may have installed its own.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def _take_up(self) -> None:
        """Consume signal numbers; wait in the pipe for the life of the process."""
        while numbers := os.read(self._reader, 64):
            for number in set(numbers) & {int(n) for n in _STOP_SIGNALS}:
                if number == signal.SIGTERM and SHIELDED in os.environ:
                    # Here, not in the thread: a SIGINT that is read next may end the process before it has run.
                    log.info("SIGTERM: left to the node agent, which stops this process when it is its turn")
                    threading.Thread(target=self._stop_if_orphan, name="shielded", daemon=True).start()
                else:
                    self._request_stop(signal.Signals(number))

    def _stop_if_orphan(self) -> None:
        """Stop if a SIGTERM means that the parent ends: the kernel sends it a little before that."""
        for _ in range(_SHIELDED_LOOKS):
            if self._is_orphan():
                self._request_stop(signal.SIGTERM)
                return
            threading.Event().wait(_PARENT_LOOK_S)

    def _request_stop(self, number: signal.Signals) -> None:
        with self._lock:
            first = not self.stop.is_set()
            self.stop.set()
            callbacks, self._callbacks = self._callbacks, []
        if not first:
            return
        log.info("%s: stopping%s", number.name, "; the parent process has ended" if self._is_orphan() else "")
        threading.Thread(target=self._exit_as_orphan, name="orphan", daemon=True).start()
        for callback in callbacks:
            callback()

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _exit_as_orphan(self) -> None:
        """Bound the stop of a process whose launcher is gone, because the launcher cannot kill it any more.

        The kernel sends SIGTERM when the thread of the launcher ends that started this process. That may be a little
        before the launcher itself ends, so the parent must be checked again.
        """
        while not self._is_orphan():
            threading.Event().wait(_PARENT_LOOK_S)
        exit_within(self.orphan_grace_s, 1, "asked to stop, without a parent")


# ---- error files: one JSON record per failed process, so that the first failure is reported and not the loudest


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Why a process ended. ``time``: of the failure, in unix seconds."""

    time: float
    kind: str
    index: int
    pid: int
    host: str
    type: str
    message: str
    traceback: str
    exit_code: int = 1  # the `realsys` command returns it if this failure ends the run
    permanent: bool = False  # a restart would fail in the same way

    @property
    def worker(self) -> str:
        return f"{self.kind}/{self.index}"

    def __str__(self) -> str:
        return f"{self.worker} (pid {self.pid} on {self.host}): {self.type}: {self.message}"


def record_of(kind: str, index: int, exc: BaseException) -> ErrorRecord:
    """Return the record of ``exc``, as a failure of this process now."""
    lines = str(exc).strip().splitlines() or ["no message"]
    return ErrorRecord(
        time=time.time(),
        kind=kind,
        index=index,
        pid=os.getpid(),
        host=socket.gethostname(),
        type=type(exc).__name__,
        message=lines[0],
        traceback="".join(traceback.format_exception(exc)),
        exit_code=getattr(exc, "exit_code", 1),
        permanent=getattr(exc, "permanent", False),
    )


def write_error(directory: Path, record: ErrorRecord) -> Path:
    """Write ``{kind}-{index}-{pid}.json`` atomically. An earlier process of the same pid keeps its file."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{record.kind}-{record.index}-{record.pid}"
    staged = directory / f".{stem}.{uuid.uuid4().hex}"
    try:
        with staged.open("w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(asdict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        final = directory / f"{stem}.json"
        try:
            os.link(staged, final)
        except FileExistsError:
            final = directory / f"{stem}-{uuid.uuid4().hex[:8]}.json"
            os.link(staged, final)
        return final
    finally:
        staged.unlink(missing_ok=True)


def read_errors(directory: Path) -> list[ErrorRecord]:
    """Return all records, earliest first. A file that is not a record is logged and skipped."""
    records: list[ErrorRecord] = []
    for path in directory.glob("[!.]*.json"):
        try:
            # Not msgspec's own parser: it refuses lone surrogates, which the text of an exception may hold.
            records.append(msgspec.convert(json.loads(path.read_text(encoding="utf-8")), ErrorRecord))
        except (OSError, ValueError, *MALFORMED) as exc:
            log.warning("%s is not an error record: %s", path, exc)
    return sorted(records, key=lambda record: record.time)

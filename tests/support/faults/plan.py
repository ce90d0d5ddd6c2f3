"""The faults of a run: a list of them in a folder, which every process of the run reads when it starts.

test ──environment(faults, folder)──> variables of the run ──> ``install`` in each worker ──> failpoint("rollout.push")

folder/plan.json        the list of ``Fault``s
folder/fired-NAME       the fault has fired: it fires once in a run, also if its process is restarted
folder/pid-KIND-INDEX   process that a fault with this victim hits
folder/GATE             the test creates it when the fault may fire: nothing depends on the speed of a process
"""

from __future__ import annotations

import errno
import fnmatch
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from realsys.cluster.failpoint import MODULE
from realsys.errors import ConfigError
from tests.support.faults.points import POINTS
from tests.support.polling import poll

FOLDER = "REALSYS_FAILPOINT_FOLDER"
ROOT = Path(__file__).resolve().parents[3]

Action = Literal[
    "kill",  # SIGKILL
    "stop",  # SIGSTOP, and SIGCONT after ``seconds``
    "exit",  # exit code 1, without a message
    "error",  # OSError ``errno`` from the point
    "slow",  # sleep ``seconds``
    "hold",  # wait until the file ``until`` is in the folder; at every pass
    "hoard",  # take address space until MemoryError
    "jump",  # move the wall clock of this process by ``seconds``
    "truncate",  # cut the file to half
    "flip",  # flip one bit in the middle of the file
    "drop",  # the caller loses the message
    "duplicate",  # the caller sends it twice
    "garbage",  # the caller sends something else
]
_BY_CALLER = ("drop", "duplicate", "garbage")
_HOLD_S = 300.0  # a hold that never ends is a defect of the test: the run must not outlive it


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong once. ``name`` names its marker file."""

    name: str
    worker: str  # whose passes count: "model_worker/0", "model_worker/*"
    point: str
    action: Action
    hit: int = 1  # number of the pass that fires, counted since the process could first see the gate
    at: int = 0  # step at which it fires, or a later one; for points that have one
    gate: str = ""  # it waits for this file in the folder
    victim: str = ""  # kill, stop: another worker, or what the test has noted a pid of
    seconds: float = 0.0
    errno: Literal["ENOSPC", "EIO"] = "ENOSPC"
    every: bool = False  # fire at each pass, not once: a disk that stays full
    file: str = "*"  # truncate, flip: the first file of this name, if the point's path is a folder
    until: str = ""  # hold


def environment(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """Write the plan to ``folder``; return the variables with which a run and its processes follow it."""
    (folder / "plan.json").write_bytes(msgspec.json.encode(faults))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {MODULE: __name__, FOLDER: str(folder), "PYTHONPATH": path}


def install(worker: str) -> Plan:
    """Return the action of this process, called by the product's ``arm``. Raises ConfigError."""
    folder = Path(os.environ.get(FOLDER, ""))
    if not os.environ.get(FOLDER) or not folder.is_dir():
        raise ConfigError(FOLDER, str(folder), "is not a directory; failpoints keep their markers there")
    plan = Plan(worker, parse((folder / "plan.json").read_bytes()), folder)
    note_pid(folder, worker, os.getpid())
    return plan


def parse(text: bytes) -> list[Fault]:
    """Decode a plan. Raises ConfigError."""
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except msgspec.DecodeError as error:
        raise ConfigError("plan.json", text[:200].decode(), f"is not a list of faults: {error}") from error
    for fault in faults:
        if fault.point not in POINTS:
            raise ConfigError("plan.json", fault.point, f"no such point; known: {', '.join(POINTS)}")
    return faults


class Plan:
    """The faults of this process; called at each failpoint."""

    def __init__(self, worker: str, faults: list[Fault], folder: Path) -> None:
        self._folder = folder
        self._faults = [fault for fault in faults if fnmatch.fnmatch(worker, fault.worker)]
        self._passes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._hoard: list[bytearray] = []

    def __call__(self, point: str, path: Path | None, at: int) -> str:
        assert point in POINTS, f"no such failpoint: {point!r}"
        for fault in self._faults:
            if fault.point == point and at >= fault.at and self._is_due(fault):
                if fault.action != "hold":
                    return self._do(fault, path)
                self._hold(fault)
        return ""

    def _is_due(self, fault: Fault) -> bool:
        if fault.gate and not (self._folder / fault.gate).exists():
            return False
        if fault.action == "hold":
            return not (self._folder / fault.until).exists()
        with self._lock:
            self._passes[fault.name] += 1
            if self._passes[fault.name] < fault.hit:
                return False
        try:
            os.close(os.open(self._folder / f"fired-{fault.name}", os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return fault.every
        return True

    def _do(self, fault: Fault, path: Path | None) -> str:
        """Do what can be done here; return what only the caller can do."""
        match fault.action:
            case "kill":
                os.kill(self._pid(fault), signal.SIGKILL)
            case "stop":
                suspend(self._pid(fault), fault.seconds)
            case "exit":
                os._exit(1)
            case "error":
                number = getattr(errno, fault.errno)
                raise OSError(number, os.strerror(number), None if path is None else str(path))
            case "slow":
                time.sleep(fault.seconds)
            case "hoard":
                hoard(self._hoard)
            case "jump":
                shift_wall_clock(fault.seconds)
            case "truncate" | "flip":
                assert path is not None, f"failpoint {fault.point} has no file"
                damage(sorted(path.glob(fault.file))[0] if path.is_dir() else path, fault.action)
        return fault.action if fault.action in _BY_CALLER else ""

    def _pid(self, fault: Fault) -> int:
        return pid_of(self._folder, fault.victim) if fault.victim else os.getpid()

    def _hold(self, fault: Fault) -> None:
        gate = self._folder / fault.until
        poll(gate.exists, f"{gate} for failpoint {fault.name}", _HOLD_S)


def note_pid(folder: Path, worker: str, pid: int) -> None:
    """Make ``pid`` the process that a fault with the victim ``worker`` hits."""
    staged = folder / f"pid-{pid}.tmp"
    staged.write_text(str(pid))
    staged.rename(_pid_file(folder, worker))


def pid_of(folder: Path, worker: str) -> int:
    """Return the pid that was noted last for ``worker``. Raises FileNotFoundError."""
    return int(_pid_file(folder, worker).read_text())


def _pid_file(folder: Path, worker: str) -> Path:
    return folder / f"pid-{worker.replace('/', '-')}"


# ---- The harm of a fault: to a file, a process or a clock


_WAKER_S = 0.25  # the waker checks this often whether the suspended process is still alive
_CHUNK = 64 << 20  # bytes


def damage(path: Path, how: Literal["truncate", "flip"]) -> None:
    """Cut a file to half, or flip one bit in its middle, as a disk might."""
    middle = path.stat().st_size // 2
    if how == "truncate":
        os.truncate(path, middle)
        return
    with path.open("r+b") as file:
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))


def suspend(pid: int, seconds: float) -> None:
    """Send SIGSTOP now, and SIGCONT after ``seconds``.

    A shell sends the second signal, because the suspended process may be this one.
    """
    # The shell counts from the moment at which the process is stopped: on a slow machine it could
    # otherwise send SIGCONT before SIGSTOP. It ends when the process is gone: the pid may be reused.
    asleep, there = f"grep -q '^State:.T' /proc/{pid}/status", f"[ -d /proc/{pid} ]"
    waker = (
        f"while {there} && ! {asleep}; do sleep 0.02; done; n={math.ceil(seconds / _WAKER_S)}; "
        f"while {there} && [ $n -gt 0 ]; do sleep {_WAKER_S}; n=$((n - 1)); done; {there} && kill -CONT {pid}"
    )
    subprocess.Popen(["sh", "-c", waker], start_new_session=True, close_fds=True)
    os.kill(pid, signal.SIGSTOP)


def shift_wall_clock(seconds: float) -> None:
    """Move the wall clock of this process, as a step of NTP does. Monotonic clocks are not moved."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def hoard(taken: list[bytearray]) -> NoReturn:
    """Take address space until MemoryError. ``taken`` keeps it."""
    while True:
        taken.append(bytearray(_CHUNK))

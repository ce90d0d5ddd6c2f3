"""Failpoints: named moments of a run at which a chaos test makes something go wrong. Off, one costs a comparison.

    REALSYS_FAILPOINTS        a JSON list of ``Fault``s; every process of the run inherits it
    REALSYS_FAILPOINT_FOLDER  where markers, gates and pids are kept, outside the trial

    failpoint("rollout.push")     the site: does nothing, does the fault, or returns what the site itself is to do

A fault fires once per run, however often its process is restarted: whoever creates its marker file first has it. Its
``gate`` is a file that the test creates when the moment has come, so that nothing depends on how fast a process is.
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
from pathlib import Path
from typing import Literal

import msgspec

from realsys.errors import ConfigError, WaitTimeout

FAULTS, FOLDER = "REALSYS_FAILPOINTS", "REALSYS_FAILPOINT_FOLDER"

#: every point, and when it is reached; ``failpoint`` knows no other
POINTS = {
    "worker.start": "any worker: before its heartbeat",
    "rollout.running": "RolloutWorker: a ticket is about to be generated, others are",
    "rollout.push": "RolloutWorker: a finished group is about to be pushed",
    "rollout.finish": "RolloutWorker: the group is stored, the manager does not know",
    "verifier.judge": "verifier process: a completion is about to be judged",
    "verifier.reply": "verifier process: verdicts are about to be sent; garbage",
    "push.send": "RolloutWorker: one push message; the site can drop, duplicate, garbage",
    "push.ack": "RolloutWorker: an acknowledgement of a push has come; drop, duplicate, garbage",
    "request.receive": "ModelWorker: a request of the master has come; drop, duplicate, garbage",
    "reply.send": "ModelWorker: a reply to the master; drop, duplicate, garbage",
    "notice.send": "ModelWorker: a notice to the master; drop, duplicate, garbage",
    "manager.call": "client of the manager: an HTTP request; drop, duplicate, garbage",
    "manager.reply": "client of the manager: the answer to it has come; drop, garbage",
    "server.call": "client of a server: an HTTP request; drop, duplicate, garbage",
    "server.reply": "client of a server: the answer to it has come; drop, garbage",
    "manager.journal": "GserverManager: records are about to be appended to the ledger",
    "manager.sync": "GserverManager: what was appended is about to be synced",
    "master.batch": "MasterWorker: a batch is taken, its plan not made; at: the step",
    "train.step": "ModelWorker: gradients are there, the optimizer's step is not taken",
    "weights.write": "ModelWorker: a shard is about to be written",
    "weights.shard": "ModelWorker: a shard is on disk; path: the file",
    "weights.manifest": "MasterWorker: all is on disk but the manifest",
    "weights.publish": "MasterWorker: the version is on disk, nobody has been told; path: its folder",
    "master.trained": "MasterWorker: the version is published, the manager does not know what is in it; at: the step",
    "server.stage": "GenerationServer: a version is about to be read",
    "server.load": "GenerationServer: a version is read and verified, about to be swapped in",
    "checkpoint.write": "ModelWorker: a rank's tensors are about to be written",
    "checkpoint.commit": "MasterWorker: all ranks have written, state.json is not there",
    "checkpoint.complete": "MasterWorker: a checkpoint is complete; path: its folder",
}

Action = Literal[
    "kill",  # SIGKILL
    "stop",  # SIGSTOP, and SIGCONT after ``seconds``
    "exit",  # at once, with exit code 1 and no word
    "error",  # OSError ``errno`` from the point
    "slow",  # sleeps ``seconds``
    "hold",  # waits until the file ``until`` is in the folder; every time
    "hoard",  # takes address space until there is no more: MemoryError
    "jump",  # the wall clock of this process, by ``seconds``
    "truncate",  # the file, to half
    "flip",  # one bit in the middle of the file
    "drop",  # the site loses the message
    "duplicate",  # the site sends it twice
    "garbage",  # the site sends something else
]
_BY_SITE = ("drop", "duplicate", "garbage")
_HOLD_S = 300.0  # a hold that nobody ends is a defect of the test: the run must not outlive it
_LOOK_S = 0.01  # between two looks at whether a hold has ended
_WAKER_S = 0.25  # between two looks at whether the suspended process is still there
_CHUNK = 64 << 20  # bytes taken at a time by "hoard"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong, once. ``name``: of its marker file."""

    name: str
    worker: str  # whose pass counts: "model_worker/0", also "model_worker/*"
    point: str
    action: Action
    hit: int = 1  # at this pass, of those since the process could first see the gate
    at: int = 0  # at this step or later, for points that have one
    gate: str = ""  # only once this file is in the folder
    victim: str = ""  # kill, stop: another worker than the one that gets there, or what the test has noted a pid of
    seconds: float = 0.0
    errno: Literal["ENOSPC", "EIO"] = "ENOSPC"
    every: bool = False  # at each pass, not once: a disk that stays full
    file: str = "*"  # truncate, flip: the first file of this name, where the point's path is a folder
    until: str = ""  # hold


class _Plan:
    """The faults of this process."""

    def __init__(self, worker: str, faults: list[Fault], folder: Path) -> None:
        self._worker, self._folder = worker, folder
        self._faults = [fault for fault in faults if fnmatch.fnmatch(worker, fault.worker)]
        self._passes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._hoard: list[bytearray] = []

    def hit(self, point: str, path: Path | None, at: int) -> str:
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
        """Do what can be done here; what only the site can do is returned."""
        match fault.action:
            case "kill":
                os.kill(self._pid(fault), signal.SIGKILL)
            case "stop":
                _suspend(self._pid(fault), fault.seconds)
            case "exit":
                os._exit(1)
            case "error":
                number = getattr(errno, fault.errno)
                raise OSError(number, os.strerror(number), None if path is None else str(path))
            case "slow":
                time.sleep(fault.seconds)
            case "hold":
                self._hold(fault)
            case "hoard":
                while True:  # until MemoryError
                    self._hoard.append(bytearray(_CHUNK))
            case "jump":
                _shift_wall_clock(fault.seconds)
            case "truncate" | "flip":
                assert path is not None, f"failpoint {fault.point} has no file"
                damage(sorted(path.glob(fault.file))[0] if path.is_dir() else path, fault.action)
        return fault.action if fault.action in _BY_SITE else ""

    def _pid(self, fault: Fault) -> int:
        return pid_of(self._folder, fault.victim) if fault.victim else os.getpid()

    def _hold(self, fault: Fault) -> None:
        deadline = time.monotonic() + _HOLD_S
        while not (self._folder / fault.until).exists():
            if time.monotonic() > deadline:
                raise WaitTimeout(f"failpoint {fault.name}: nobody made {self._folder / fault.until} in {_HOLD_S:g} s")
            time.sleep(_LOOK_S)


class _Process:
    """What this process has been told; ``plan`` is None outside of chaos tests."""

    plan: _Plan | None = None


def arm(worker: str) -> None:
    """To be called once, when a process knows which worker it is. Raises ConfigError for a plan that is wrong."""
    text = os.environ.get(FAULTS)
    if not text:
        return
    folder = Path(os.environ.get(FOLDER, ""))
    if not os.environ.get(FOLDER) or not folder.is_dir():
        raise ConfigError(FOLDER, str(folder), "no such directory; failpoints keep their markers there")
    _Process.plan = _Plan(worker, parse(text), folder)
    note_pid(folder, worker, os.getpid())


def failpoint(point: str, path: Path | None = None, at: int = 0) -> str:
    """This process is at ``point``. Returns "drop", "duplicate" or "garbage" if the site is to do that, else "".

    Raises what a fault says: OSError, MemoryError. ``at``: of a step or version, for faults of one.
    """
    if _Process.plan is None:
        return ""
    return _Process.plan.hit(point, path, at)


def parse(text: str) -> list[Fault]:
    """The faults of REALSYS_FAILPOINTS. Raises ConfigError."""
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except msgspec.DecodeError as error:
        raise ConfigError(FAULTS, text[:200], f"is no list of faults: {error}") from error
    for fault in faults:
        if fault.point not in POINTS:
            raise ConfigError(FAULTS, fault.point, f"no such point; known: {', '.join(POINTS)}")
    return faults


def note_pid(folder: Path, worker: str, pid: int) -> None:
    """From now on ``pid`` is the one that a fault with the victim ``worker`` hits."""
    staged = folder / f"pid-{pid}.tmp"
    staged.write_text(str(pid))
    staged.rename(_pid_file(folder, worker))


def pid_of(folder: Path, worker: str) -> int:
    """Of the process that was noted last as ``worker``. Raises FileNotFoundError when there was none."""
    return int(_pid_file(folder, worker).read_text())


def _pid_file(folder: Path, worker: str) -> Path:
    return folder / f"pid-{worker.replace('/', '-')}"


def damage(path: Path, how: Literal["truncate", "flip"]) -> None:
    """Cut the file to half, or turn one bit in its middle, as a disk might."""
    middle = path.stat().st_size // 2
    if how == "truncate":
        os.truncate(path, middle)
        return
    with path.open("r+b") as file:
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))


def _suspend(pid: int, seconds: float) -> None:
    """SIGSTOP; the waker is a process of its own, because this one may be the one that is suspended."""
    # It sleeps once the other one does: else a slow machine could wake it first, and never again.
    # It gives up when that one is gone: its pid may soon be somebody else's.
    asleep, there = f"grep -q '^State:.T' /proc/{pid}/status", f"[ -d /proc/{pid} ]"
    waker = (
        f"while {there} && ! {asleep}; do sleep 0.02; done; n={math.ceil(seconds / _WAKER_S)}; "
        f"while {there} && [ $n -gt 0 ]; do sleep {_WAKER_S}; n=$((n - 1)); done; {there} && kill -CONT {pid}"
    )
    subprocess.Popen(["sh", "-c", waker], start_new_session=True, close_fds=True)
    os.kill(pid, signal.SIGSTOP)


def _shift_wall_clock(seconds: float) -> None:
    """From now on the wall clock of this process is off by so much, as after a step of NTP. Monotonic clocks go on."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)

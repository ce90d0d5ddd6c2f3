"""The harm of a fault: to a file, a process or a clock."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Literal, NoReturn

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

"""Limits of one run of a program, and how a run ended."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

#: why a program failed; metrics of the code verifier have these names
REASONS = (
    CPU := "cpu",  # over cpu_s
    WALL := "wall",  # over wall_s
    MEMORY := "memory",  # over memory_mb
    OUTPUT := "output",  # over output_mb
    CRASHED := "crashed",  # it raised, or ended with another exit code than 0, or by a signal
    WRONG := "wrong",  # it ran, and a test found a wrong result
    NO_PROGRAM := "no_program",  # the completion has no program
)

_BUSY = 10.0  # times its time that a program may take on a busy machine


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run of a program and all that it starts.

    cpu_s       CPU time, of all its processes together
    wall_s      time on the clock, less the time in which the machine had no processor for it
    memory_mb   memory in MiB: address space of each process, and memory of all its processes together
    processes   processes and threads at a time
    output_mb   stdout and stderr together
    file_mb     size of one file that it writes
    disk_mb     files in /tmp together; they are in memory
    open_files  descriptors of one process: the buffer of a socket has 208 KiB, which memory_mb does not count
    bound_address_space  False for programs that reserve much more memory than they use, such as a Java machine
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_mb: float = 1024.0
    processes: int = 16
    output_mb: float = 16.0
    file_mb: float = 32.0
    disk_mb: float = 64.0
    open_files: int = 32
    bound_address_space: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that is not finite and greater than 0, and for a disk of less than 1 MiB."""
        for field in dataclasses.fields(self):
            if field.name != "bound_address_space" and not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}: it must be finite and greater than 0")
        if self.disk_mb < 1:
            raise ValueError(f"disk_mb is {self.disk_mb:g}: it must be at least 1")

    def as_message(self, calls: int = 0) -> dict[str, Any]:
        """Return them for the zygote. ``calls``: greatest number of calls that the process answers; 0: one run."""
        return {**dataclasses.asdict(self), "process_cpu_s": self.cpu_s * max(1, calls), "watch_clock": not calls}

    @property
    def clock_s(self) -> float:
        """Bound on a run by the clock. A program that reaches it has not been given its time."""
        return _BUSY * self.wall_s + 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program.

    code     exit code, or the negative number of the signal
    reached  the limit that it reached (one of REASONS), or ""
    waited_s part of wall_s in which the machine had no processor for it, if it was long
    """

    code: int
    reached: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    peak_mb: float = 0.0

    @property
    def own_s(self) -> float:
        """Return the time for which the program is to blame."""
        return max(0.0, self.wall_s - self.waited_s)

    @property
    def reason(self) -> str:
        """Return why the run failed; "" if it did not."""
        return self.reached or (CRASHED if self.code else "")


@dataclass(frozen=True, slots=True)
class Output:
    """A run with input and output. ``made``: the file that a command was to make."""

    ended: Ended
    stdout: bytes
    stderr: bytes
    made: bytes | None = None


@dataclass(frozen=True, slots=True)
class UnitTestsResult:
    """Result of unit tests. ``reason``: "" if they passed, else one of REASONS; ``why``: in words."""

    passed: bool
    reason: str = ""
    why: str = ""

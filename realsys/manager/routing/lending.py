"""Devices that servers and training ranks use in turn: whose turn it is, and when it changes. Pure.

    servers ──take: a batch is ready, and waiting longer does not pay──> each lent server sleeps ──> trainer
       ^                                                                                                │
       └───────── each wakes, loads the newest version, and continues its requests <──give back─────────┘

one-at-a-time   A lent server has memory from the order to wake to the end of the order to sleep. It starts asleep, and
                the trainer computes only while all that are registered sleep.

A manager that has just started does not know whose turn it is: it orders nothing, and routes to no lent server, until
the trainer says so. Both orders do nothing to a server that has followed them before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Turn = Literal["unknown", "trainer", "servers"]


@dataclass(frozen=True, slots=True)
class Shift:
    """An order to a lent server: to sleep, or to wake."""

    server: str
    incarnation: str
    url: str
    sleeps: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """What the servers do while a batch is ready.

    missing       groups that the batch after it still lacks
    running       groups that run
    groups_per_s  groups that end per second; 0: not known
    fill          running completions, as a share of the most in this turn of the servers
    """

    missing: int
    running: int
    groups_per_s: float
    fill: float


class Lending:
    """Whose turn it is. ``lent``: names of the servers that share devices with ranks."""

    def __init__(self, lent: frozenset[str] = frozenset()) -> None:
        self.lent = lent
        self.turn: Turn = "unknown"
        self.reason = ""  # why the turn changed last, or does not change yet
        self.began = 0.0  # of the turn
        self.evaluates_since: float | None = None  # since when an evaluation keeps the devices from the trainer
        self.groups = 0  # groups that had ended when the turn of the servers began
        self._sleep_s: float | None = None  # of the last time that all servers fell asleep
        self._rise_s = 0.0  # from the start of the turn until a server had its memory, the last time
        self._wake_s: float | None = None  # until it served
        self._most = 0  # completions that ran at once in this turn of the servers

    def give_back(self, now: float, groups: int) -> None:
        """Start the turn of the servers. ``groups``: those that have ended so far."""
        if self.turn != "servers":
            self.turn, self.reason, self.began, self.groups, self._most = "servers", "no batch is ready", now, groups, 0

    def take(self, now: float, reason: str) -> None:
        """Start the turn of the trainer: the servers must fall asleep."""
        self.turn, self.reason, self.began, self.evaluates_since = "trainer", reason, now, None

    def asleep(self, now: float) -> None:
        """Note that all servers sleep in the trainer's turn, which nobody has noted before."""
        if self.began:
            self._sleep_s, self.began = now - self.began, 0.0

    def awake(self, now: float) -> None:
        """Note that a server has its memory again."""
        self._rise_s = now - self.began

    def woke(self, seconds: float) -> None:
        """Note that a server that had woken has loaded the newest version within ``seconds``."""
        self._wake_s = self._rise_s + seconds

    def fill(self, running: int) -> float:
        """Return ``running`` completions as a share of the most that ran at once in this turn."""
        self._most = max(self._most, running)
        return running / self._most if self._most else 0.0

    def decide(self, progress: Progress) -> tuple[bool, str]:
        """Return whether the trainer, which has a batch, takes the devices now, and why.

        A further batch in this turn saves a switch later: its seconds. Waiting for it costs the part of the servers'
        time that they are not filled. ``max_staleness`` bounds the wait: without a new version no further group is
        granted, so at last fewer run than are missing.
        """
        if self._sleep_s is None or self._wake_s is None:
            return True, "a batch is ready, and the time of a switch is not known yet"
        if progress.running < progress.missing:
            problem = f"{progress.missing} groups are missing for another, and {progress.running} run"
            return True, f"a batch is ready; {problem}"
        if not progress.groups_per_s:
            return True, "a batch is ready, and the time until another one is not known"
        wait_s, switch_s = progress.missing / progress.groups_per_s, self._sleep_s + self._wake_s
        idle_s = wait_s * (1 - progress.fill)
        numbers = f"{wait_s:.1f} s to another batch, {1 - progress.fill:.0%} idle; a switch takes {switch_s:.1f} s"
        return idle_s >= switch_s, f"a batch is ready; {numbers}"

"""One ticket of the rollout ledger while it is open, and the numbers of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

OpenState = Literal["running", "finished", "waiting"]


def ticket_name(number: int) -> str:
    """Lexical order of ticket ids is grant order."""
    return f"{number:010d}"


def ticket_number(ticket_id: str) -> int | None:
    """The number in a ticket id, None if it is not of that form."""
    return int(ticket_id) if len(ticket_id) == 10 and ticket_id.isascii() and ticket_id.isdigit() else None


def label(text: str) -> str:
    """The countable part of a reason: what stands before the first colon, one line, at most 48 characters."""
    return " ".join(text.split(":", 1)[0].split())[:48] or "unnamed"


@dataclass(slots=True)
class OpenTicket:
    """A ticket that has not ended."""

    ticket_id: str
    prompt_index: int
    attempt: int
    worker: str
    incarnation: str
    version: int
    news_at: float  # last sign of life; the lease runs from here, and when it has finished, the time to arrive
    failures: int = 0
    state: OpenState = "running"
    request: str = ""  # id of the allocation that the attempt answered


@dataclass(slots=True)
class LedgerCounts:
    """Numbers of tickets by state, of drops by reason and of re-issues by cause."""

    inherited: int = 0  # groups trained before the checkpoint that this trial continues from; they have no ticket here
    granted: int = 0  # tickets
    attempts: int = 0
    starts: int = 0  # of the training side: the first one, and one for each roll-back
    open: dict[OpenState, int] = field(default_factory=lambda: {"running": 0, "finished": 0, "waiting": 0})
    trained: int = 0
    dropped: int = 0
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    reissued_by_cause: Counter[str] = field(default_factory=Counter)
    anomalies: Counter[str] = field(default_factory=Counter)

    @property
    def counted(self) -> int:
        """N of the admission inequality without the candidate."""
        return self.inherited + self.open["running"] + self.open["finished"] + self.trained

    def by_state(self) -> dict[str, int]:
        """Tickets in each state; the sum is ``granted``."""
        states: dict[str, int] = {state: number for state, number in self.open.items()}  # noqa: C416 (wider key type)
        return states | {"trained": self.trained, "dropped": self.dropped}

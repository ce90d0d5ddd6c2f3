"""Columns of the ledger: outcome, attempt, prompt and staleness of every ticket, 19 bytes each, by ticket number; and
the success rate of every prompt, 2 bytes each.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from realsys.manager.ledger.events import Snapshot
from realsys.manager.ledger.prompt_order import UNSEEN
from realsys.manager.ledger.tickets import label, ticket_number

OPEN, FIRST_REASON = -1, -2  # outcome codes; a version >= 0 means trained, <= -2 dropped for reason -2 - code
MAX_REASONS = 64  # distinct reasons counted by name: a worker's free text must not grow the table without bound
UNKNOWN_LAG, LONGEST_LAG = -1, 32767


class TicketColumns:
    """One row per ticket that was ever granted. ``attempt`` is the latest; ``lag`` and ``stale``: see Snapshot."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.outcome = array("i", snapshot.outcome if snapshot else ())
        self.attempt = array("i", snapshot.attempt if snapshot else ())
        self.prompt = array("q", snapshot.prompt if snapshot else ())
        self.lag = array("h", snapshot.lag if snapshot else ())
        self.stale = array("B", (snapshot.stale or bytes(len(snapshot.lag))) if snapshot else ())
        self.reasons: list[str] = list(snapshot.reasons) if snapshot else []

    def in_snapshot(self) -> dict[str, Any]:
        """Return copies of the columns, by their names in a Snapshot."""
        columns = {name: getattr(self, name).tolist() for name in ("outcome", "attempt", "prompt", "lag", "stale")}
        return {**columns, "reasons": list(self.reasons)}

    def __len__(self) -> int:
        return len(self.outcome)

    def append(self, prompt_index: int) -> None:
        """Add a ticket at its first attempt."""
        self.outcome.append(OPEN)
        self.attempt.append(0)
        self.prompt.append(prompt_index)
        self.lag.append(UNKNOWN_LAG)
        self.stale.append(0)

    def number(self, ticket_id: str) -> int | None:
        """Return the ticket's number, None for a ticket that was never granted."""
        number = ticket_number(ticket_id)
        return number if number is not None and number < len(self) else None

    def reopen_younger(self, version: int) -> list[tuple[int, int]]:
        """Open all tickets again that were trained later than ``version``. Returns (number, version) of each."""
        numbers: list[int] = np.flatnonzero(np.asarray(self.outcome) > max(version, OPEN)).tolist()
        trained = [(number, self.outcome[number]) for number in numbers]
        for number in numbers:
            self.outcome[number] = OPEN
            self.lag[number] = UNKNOWN_LAG
        return trained

    def reason_code(self, reason: str) -> int:
        """Return the outcome code of a drop for ``reason``."""
        name = label(reason)
        if name not in self.reasons:
            if len(self.reasons) >= MAX_REASONS:
                name = "other"
            if name not in self.reasons:
                self.reasons.append(name)
        return FIRST_REASON - self.reasons.index(name)

    def reason(self, code: int) -> str:
        """Return the reason of a dropped ticket's outcome code."""
        return self.reasons[FIRST_REASON - code]

    def end_of(self, ticket_id: str) -> str | None:
        """Return ``trained@k`` or ``dropped: reason``, None while the ticket is open or unknown."""
        number = self.number(ticket_id)
        code = OPEN if number is None else self.outcome[number]
        if code == OPEN:
            return None
        return f"trained@{code}" if code >= 0 else f"dropped: {self.reason(code)}"

    def ends(self) -> tuple[int, Counter[str]]:
        """Return the number of trained tickets, and of dropped tickets by reason."""
        codes = Counter(self.outcome)
        trained = sum(number for code, number in codes.items() if code >= 0)
        return trained, Counter({self.reason(code): number for code, number in codes.items() if code < OPEN})


def bounded(counter: Counter[str], name: str) -> str:
    """Return ``name``, or "other" where the counter has as many names as it may."""
    return name if name in counter or len(counter) < MAX_REASONS else "other"


class PromptRates:
    """Measured success rate of every prompt in per mille, UNSEEN before its first verdict.

    A measurement is averaged with the rate before it, because the policy changes and one group is few episodes.
    """

    def __init__(self, rates: Iterable[int] = ()) -> None:
        self.values = array("h", rates)
        self.revision = 0  # changes with every measurement

    def resize(self, prompts: int) -> None:
        """Make room for ``prompts`` prompts."""
        self.values += array("h", [UNSEEN]) * (prompts - len(self.values))

    def observe(self, prompt: int, correct: int, judged: int) -> None:
        """Add a group with ``correct`` of ``judged`` episodes right. Prompts that are not there are ignored."""
        if not judged or prompt >= len(self.values):
            return
        before, rate = self.values[prompt], round(1000 * min(correct, judged) / judged)
        # Rounded away from the old rate: a prompt that is always right ends at 1000.
        self.values[prompt] = rate if before == UNSEEN else (before + rate + (rate > before)) // 2
        self.revision += 1

    def of(self, prompt: int) -> int:
        """Return the rate of a prompt."""
        return self.values[prompt] if prompt < len(self.values) else UNSEEN

    def shares(self) -> dict[str, float]:
        """Return the shares of prompts never judged, all wrong, between, and all right."""
        rates = np.asarray(self.values)
        counts = {
            "unseen": np.count_nonzero(rates == UNSEEN),
            "wrong": np.count_nonzero(rates == 0),
            "between": np.count_nonzero((rates > 0) & (rates < 1000)),
            "right": np.count_nonzero(rates == 1000),
        }
        return {name: int(count) / max(1, len(rates)) for name, count in counts.items()}

    def measured(self) -> list[int]:
        """Return all rates; [] if there is no measurement."""
        return self.values.tolist() if any(rate != UNSEEN for rate in self.values) else []

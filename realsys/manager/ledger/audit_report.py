"""What an audit of the ledger (``audit``) comes to: counts, and what was claimed and did not hold."""

from __future__ import annotations

import msgspec

#: name -> what holds if it is ok
CLAIMS = {
    "journal": "every record can be read, and none is missing before the last",
    "prompts": "every prompt position below the cursor was granted exactly once, what was given back too",
    "attempts": "one attempt of a ticket at a time, each after the loss of the one before",
    "ends": "no ticket ended twice",
    "trained": "no ticket was trained twice, unless a roll-back lies between",
    "versions": "each version was trained once, in order, by the training side that started last",
    "staleness": "nothing older than eta was trained (stale_policy=drop)",
    "admission": "floor((N - 1) / B) <= v + eta at every grant",
    "steps": "the trainer's own record names the same tickets for each step",
    "replay": "the manager's replay accepts every record, and each ticket is in exactly one state",
}


class Check(msgspec.Struct):
    """``problems`` is empty if the claim holds; ``skipped`` says why it was not checked."""

    name: str
    claim: str
    problems: list[str] = []
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems


class RollBackRow(msgspec.Struct):
    """One start of the training side."""

    version: int
    incarnation: str
    reissued: int
    time: float


class AuditReport(msgspec.Struct):
    """What ``realsys audit --json`` prints. ``histogram``: lag of the oldest token in versions -> trained tickets."""

    ok: bool
    records: int
    compacted: int
    torn_bytes: int
    inherited: int
    granted: int
    attempts: int
    states: dict[str, int]
    dropped_by_reason: dict[str, int]
    reissued_by_cause: dict[str, int]
    starts: list[RollBackRow]
    steps: int
    histogram: dict[str, int]
    open: dict[str, str]
    checks: list[Check]

"""Report of an audit of the ledger: counts, and the claims that did not hold."""

from __future__ import annotations

import msgspec

#: check -> claim that holds if the check is ok
CLAIMS = {
    "journal": "every record can be read, and none is missing before the last",
    "prompts": "every prompt position below the cursor was granted once, or passed over by the curriculum",
    "attempts": "one attempt of a ticket at a time, each after the loss of the one before",
    "ends": "no ticket ended twice (one-end)",
    "trained": "no ticket was trained twice, unless a roll-back lies between",
    "versions": "each version was trained once, in order, by the trainer that started last (monotonic)",
    "staleness": "nothing older than eta was trained, or reissued too often for it (stale_policy=mask, drop)",
    "admission": "floor((N - 1) / B) <= v + eta at every grant",
    "steps": "the trainer's own record names the same tickets for each step",
    "replay": "the manager's replay accepts every record, and each ticket is in exactly one state",
}


class Check(msgspec.Struct):
    """Result of one check. ``problems`` is empty if the claim holds; ``skipped`` says why it was not checked."""

    name: str
    claim: str
    problems: list[str] = []
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems


class RollBackRow(msgspec.Struct):
    """One start of a trainer."""

    version: int
    incarnation: str
    reissued: int
    time: float


class AuditReport(msgspec.Struct):
    """Output of ``realsys audit --json``. ``histogram``: versions behind of the oldest token -> trained tickets."""

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

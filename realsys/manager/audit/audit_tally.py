"""AuditTally: the tickets, counts and problems of an audit, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.manager.audit.audit_report import CLAIMS, AuditReport, Check, RollBackRow
from realsys.manager.audit.prompt_audit import PromptAudit
from realsys.manager.ledger.events import Opened
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.order import PromptOrder
from realsys.manager.ledger.tickets import OPEN_STATES

ENDED = ("trained", "dropped")


@dataclass(slots=True)
class Seen:
    """A ticket as the records tell it."""

    prompt: int
    state: str = "running"
    attempt: int = 0
    oldest: int = -1  # version of its oldest token, as the worker reported it
    version: int = -1  # version that it is trained in
    lag: int = -1
    reason: str = ""
    stale: int = 0  # reissues because its group was too old


@dataclass
class AuditTally:
    """Everything that the records said so far.

    newest       version that was trained last
    granted_at   version of the last grant
    lost_steps   versions that a trainer went back to: it may have died before it wrote its log
    """

    tickets: dict[str, Seen] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in CLAIMS})
    states: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    opened: Opened | None = None
    prompts: PromptAudit = field(default_factory=PromptAudit)
    starts: list[RollBackRow] = field(default_factory=list)
    trainer_incarnation: str = ""
    records: int = 0
    compacted: int = 0
    inherited: int = 0
    attempts: int = 0
    newest: int = 0
    granted_at: int = -1
    lost_steps: set[int] = field(default_factory=set)
    ledger: Ledger = field(default_factory=lambda: Ledger(PromptOrder(seed=0, size=1), max_attempts=1))

    def note(self, check: str, line: int, text: str) -> None:
        """Add a problem of the record in ``line``."""
        self.problems[check].append(f"line {line}: {text}")

    def move(self, seen: Seen, state: str) -> None:
        """Count a ticket in another state."""
        self.states[seen.state] -= 1
        self.states[state] += 1
        seen.state = state

    def current(self, ticket_id: str, attempt: int | None, what: str, line: int) -> Seen | None:
        """Return the open ticket of a record. Notes a problem, and returns None, if it is unknown or has ended."""
        seen = self.tickets.get(ticket_id)
        if seen is None:
            self.note("attempts", line, f"ticket {ticket_id} {what}, but never granted")
        elif seen.state in ENDED:
            self.note("ends", line, f"ticket {ticket_id} {what} after it was {seen.state}")
            return None
        elif attempt is not None and attempt != seen.attempt:
            self.note("attempts", line, f"ticket {ticket_id}: attempt {attempt} {what}, but {seen.attempt} is current")
        return seen

    def compare_steps(self, logged: Mapping[int, Sequence[str]], recovered: Collection[int] = ()) -> None:
        """Compare with the step log. ``logged``: step -> its tickets, unless a recovery undid it; ``recovered``: steps
        that a recovery went back to.
        """
        lost = self.lost_steps.union(recovered)
        trained: dict[int, set[str]] = {}
        for name, seen in self.tickets.items():
            if seen.state == "trained":
                trained.setdefault(seen.version, set()).add(name)
        problems = self.problems["steps"]
        for step in sorted(trained.keys() | logged.keys()):
            ours, theirs = trained.get(step, set()), set(logged.get(step, ()))
            if step not in logged and (step == self.newest or step in lost):
                continue  # the trainer reports to the ledger before it writes its log, and may have died in between
            if twice := len(logged.get(step, ())) - len(theirs):
                problems.append(f"step {step}: the step log names {twice} tickets twice")
            if missing := sorted(ours - theirs):
                problems.append(f"step {step}: not in the step log: ticket {', '.join(missing)}")
            if extra := sorted(theirs - ours):
                problems.append(f"step {step}: only in the step log: ticket {', '.join(extra)}")

    def report(self, *, torn_bytes: int = 0, skipped: Mapping[str, str] | None = None) -> AuditReport:
        """Return the report. ``skipped``: checks that could not be made, and why."""
        reasons = dict(skipped or {})
        states = {state: self.states[state] for state in (*OPEN_STATES, *ENDED)}
        replayed = self.ledger.counts.by_state()
        if not self.problems["replay"] and states != replayed:
            self.problems["replay"].append(f"the records lead to {states}, the manager's replay to {replayed}")
        if self.opened is None and not self.tickets:
            for name in ("staleness", "admission"):
                reasons.setdefault(name, "no record says what B and eta were")
        elif self.opened is not None and self.opened.stale_policy == "train":
            reasons["staleness"] = f"stale_policy={self.opened.stale_policy}: older groups may be trained"
        trained = [seen for seen in self.tickets.values() if seen.state == "trained"]
        lags = Counter(seen.lag for seen in trained)
        checks = [Check(name, claim, self.problems[name], reasons.get(name, "")) for name, claim in CLAIMS.items()]
        return AuditReport(
            ok=all(check.ok for check in checks),
            records=self.records,
            compacted=self.compacted,
            torn_bytes=torn_bytes,
            inherited=self.inherited,
            granted=len(self.tickets),
            attempts=self.attempts,
            states=states,
            dropped_by_reason=dict(Counter(seen.reason for seen in self.tickets.values() if seen.state == "dropped")),
            reissued_by_cause=dict(self.causes),
            starts=self.starts,
            steps=len({seen.version for seen in trained}),
            histogram={str(lag) if lag >= 0 else "unknown": lags[lag] for lag in sorted(lags)},
            open={name: seen.state for name, seen in self.tickets.items() if seen.state not in ENDED},
            checks=checks,
        )

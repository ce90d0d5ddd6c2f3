"""Audit of a trial's ledger: a second opinion on its journal, by rules of its own. Pure: events in, report out.

    records of the journal ──observe──> per ticket: state, attempt, end ──┐
    train records of the step log ────────────────────────────────────────┴──report──> counts and checks

It shares nothing with ``Ledger`` but the records, so that a mistake there does not hide itself; the last check is that
the ledger's own replay comes to the same numbers. A problem never ends the audit: it is noted, with its line.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.errors import LedgerError
from realsys.manager.ledger.audit_report import CLAIMS, AuditReport, Check, RollBackRow
from realsys.manager.ledger.events import (
    Claimed,
    Dropped,
    Event,
    Finished,
    Granted,
    Opened,
    Reissued,
    Resumed,
    RolledBack,
    Snapshot,
    Trained,
)
from realsys.manager.ledger.ledger import Ledger
from realsys.manager.ledger.order import PromptOrder
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.ledger.tickets import OPEN_STATES, label, ticket_name

ENDED = ("trained", "dropped")
_COUNTED = tuple(state for state in OPEN_STATES if state != "waiting")


@dataclass(slots=True)
class Seen:
    """A ticket as the records tell it."""

    prompt: int
    state: str = "running"
    attempt: int = 0
    oldest: int = -1  # version of its oldest token, as the worker said
    version: int = -1  # it is trained in
    lag: int = -1
    reason: str = ""


@dataclass(slots=True)
class Auditor:
    """Feed it every record with its line, then ask for the ``report``."""

    tickets: dict[str, Seen] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in CLAIMS})
    states: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    opened: Opened | None = None
    order: PromptOrder | None = None
    starts: list[RollBackRow] = field(default_factory=list)
    trainer_incarnation: str = ""
    records: int = 0
    compacted: int = 0
    inherited: int = 0
    attempts: int = 0
    cursor: int = 0
    newest: int = 0  # version that was trained last
    granted_at: int = -1  # version of the last grant
    given_back: deque[int] = field(default_factory=deque)
    lost_steps: set[int] = field(default_factory=set)  # versions gone back to: the trainer may have died before its log
    ledger: Ledger = field(default_factory=lambda: Ledger(PromptOrder(seed=0, size=1), max_attempts=1))

    def observe(self, event: Event, line: int) -> None:
        """The next record."""
        self.records += 1
        match event:
            case Granted():
                self._granted(event, line)
            case Finished():
                self._finished(event, line)
            case Claimed():
                self._claimed(event, line)
            case Trained():
                self._trained(event, line)
            case Reissued():
                self._lost(event.ticket_id, event.attempt, label(event.cause), line)
            case Dropped():
                self._dropped(event, line)
            case RolledBack():
                self._rolled_back(event, line)
            case Opened():
                self.opened, self.order = event, PromptOrder(event.seed, event.prompts)
            case Resumed():
                self.inherited, self.cursor, self.newest = event.groups, event.cursor, event.step
                self.given_back.extend(event.pending)
            case Snapshot():
                self._snapshot(event)
            case _:
                return  # evaluations are no tickets of the quota
        self._replay(event, line)

    def _note(self, check: str, line: int, text: str) -> None:
        self.problems[check].append(f"line {line}: {text}")

    def _move(self, seen: Seen, state: str) -> None:
        self.states[seen.state] -= 1
        self.states[state] += 1
        seen.state = state

    def _replay(self, event: Event, line: int) -> None:
        if not self.problems["replay"]:
            try:
                self.ledger.apply(event)  # type: ignore[arg-type]  # observe() lets no event of evaluations come here
            except LedgerError as error:
                self._note("replay", line, str(error))

    # -- records -----------------------------------------------------------------------------------------------------

    def _granted(self, event: Granted, line: int) -> None:
        seen = self.tickets.get(event.ticket_id)
        self.attempts += 1
        if seen is None:
            self._new(event, line)
        else:
            if seen.state in ENDED:
                self._note("ends", line, f"ticket {event.ticket_id} granted again after it was {seen.state}")
            elif seen.state != "waiting" or event.attempt != seen.attempt + 1:
                was = f"attempt {seen.attempt} was {seen.state}"
                self._note("attempts", line, f"ticket {event.ticket_id}: attempt {event.attempt} granted while {was}")
            if event.prompt_index != seen.prompt:
                what = f"granted again with prompt {event.prompt_index} instead of {seen.prompt}"
                self._note("prompts", line, f"ticket {event.ticket_id} {what}")
            seen.attempt, seen.oldest = event.attempt, -1
            self._move(seen, "running")
        self._granted_at(event, line)
        if self.opened is None:
            self._note("admission", line, f"ticket {event.ticket_id} granted before any record says what B and eta are")
        else:
            counted = self.inherited + sum(self.states[state] for state in (*_COUNTED, "trained"))
            bound = StalenessBound(self.opened.batch_groups, self.opened.eta)
            if not bound.admits(counted, event.version):
                limit = f"{bound.capacity(event.version)} at version {event.version}"
                self._note("admission", line, f"ticket {event.ticket_id} granted as number {counted}, beyond {limit}")

    def _granted_at(self, event: Granted, line: int) -> None:
        """A version is published before the ledger is told what it has trained, but not one further."""
        if event.version < self.granted_at:
            self._note("versions", line, f"ticket {event.ticket_id} granted at {event.version} after {self.granted_at}")
        elif event.version > self.newest + 1:
            what = f"at version {event.version}, and {self.newest} is the newest that was trained"
            self._note("versions", line, f"ticket {event.ticket_id} granted {what}")
        self.granted_at = event.version

    def _new(self, event: Granted, line: int) -> None:
        if event.ticket_id != ticket_name(len(self.tickets)):
            wanted = ticket_name(len(self.tickets))
            self._note("prompts", line, f"ticket {event.ticket_id} granted where {wanted} was the next: one is lost")
        if event.attempt:
            self._note("attempts", line, f"ticket {event.ticket_id} begins with attempt {event.attempt}")
        self.tickets[event.ticket_id] = Seen(event.prompt_index, attempt=event.attempt)
        self.states["running"] += 1
        if event.position < 0:
            if event.prompt_index in self.given_back:
                self.given_back.remove(event.prompt_index)
            else:
                self._note("prompts", line, f"ticket {event.ticket_id}: prompt {event.prompt_index} was not given back")
            return
        if event.position != self.cursor:
            what = "granted before" if event.position < self.cursor else f"granted before {self.cursor}"
            self._note("prompts", line, f"ticket {event.ticket_id}: prompt position {event.position} was {what}")
        elif self.order is not None and self.order.at(event.position) != event.prompt_index:
            expected = self.order.at(event.position)
            self._note("prompts", line, f"ticket {event.ticket_id}: prompt {event.prompt_index} instead of {expected}")
        self.cursor = max(self.cursor, event.position + 1)

    def _finished(self, event: Finished, line: int) -> None:
        seen = self._current(event.ticket_id, event.attempt, f"finished ({event.outcome})", line)
        if seen is None:
            return
        if seen.state != "running":
            self._note("attempts", line, f"ticket {event.ticket_id} finished, though it was {seen.state}")
        if event.outcome == "accepted":
            seen.oldest = event.version_min
            self._move(seen, "finished")
        elif event.outcome == "failed" and event.retry:
            self.causes["failed"] += 1
            self._move(seen, "waiting")
        else:
            seen.reason = f"{event.outcome} {label(event.reason)}" if event.reason else event.outcome
            self._move(seen, "dropped")

    def _dropped(self, event: Dropped, line: int) -> None:
        seen = self._current(event.ticket_id, None, f"dropped ({event.reason})", line)
        if seen is not None:
            seen.reason = label(event.reason)
            self._move(seen, "dropped")
            if event.requeue:
                self.given_back.append(seen.prompt)

    def _lost(self, ticket_id: str, attempt: int, cause: str, line: int) -> None:
        seen = self._current(ticket_id, attempt, f"re-issued ({cause})", line)
        if seen is not None:
            if seen.state in ("waiting", "claimed"):
                self._note("attempts", line, f"ticket {ticket_id} re-issued ({cause}) while it was {seen.state}")
            self.causes[cause] += 1
            self._move(seen, "waiting")

    def _current(self, ticket_id: str, attempt: int | None, what: str, line: int) -> Seen | None:
        """The open ticket that a record is about; None, noted, if there is none."""
        seen = self.tickets.get(ticket_id)
        if seen is None:
            self._note("attempts", line, f"ticket {ticket_id} {what}, but never granted")
        elif seen.state in ENDED:
            self._note("ends", line, f"ticket {ticket_id} {what} after it was {seen.state}")
            return None
        elif attempt is not None and attempt != seen.attempt:
            self._note("attempts", line, f"ticket {ticket_id}: attempt {attempt} {what}, but {seen.attempt} is current")
        return seen

    def _claimed(self, event: Claimed, line: int) -> None:
        self._by_whom("claimed for", event.version, event.incarnation, line)
        if event.version != self.newest + 1:
            self._note("versions", line, f"tickets claimed for version {event.version} after version {self.newest}")
        for ticket_id in event.tickets:
            seen = self._current(ticket_id, None, f"claimed for version {event.version}", line)
            if seen is not None:
                if seen.state == "claimed":
                    self._note("attempts", line, f"ticket {ticket_id} claimed twice for version {event.version}")
                self._move(seen, "claimed")

    def _by_whom(self, what: str, version: int, incarnation: str, line: int) -> None:
        if self.starts and incarnation != self.trainer_incarnation:
            ours = f"{incarnation or 'unknown'}, while {self.trainer_incarnation} had started"
            self._note("versions", line, f"{what} version {version} by training side {ours}")

    def _trained(self, event: Trained, line: int) -> None:
        self._by_whom("trained", event.version, event.incarnation, line)
        if event.version != self.newest + 1:
            self._note("versions", line, f"version {event.version} trained after version {self.newest}")
        self.newest = event.version
        if self.opened is not None and len(event.tickets) != self.opened.batch_groups:
            what = f"{len(event.tickets)} groups, a batch has {self.opened.batch_groups}"
            self._note("versions", line, f"version {event.version} trained on {what}")
        for i, ticket_id in enumerate(event.tickets):
            seen = self.tickets.get(ticket_id)
            if seen is None:
                self._note("attempts", line, f"ticket {ticket_id} trained at version {event.version}, never granted")
                continue
            if seen.state == "trained":
                times = f"at version {seen.version} and again at {event.version}"
                self._note("trained", line, f"ticket {ticket_id} trained {times}")
            elif seen.state == "dropped":
                self._note("ends", line, f"ticket {ticket_id} trained at version {event.version} after it was dropped")
            elif seen.state != "claimed":
                what = f"trained at version {event.version}, though it was {seen.state}, not claimed"
                self._note("attempts", line, f"ticket {ticket_id} {what}")
            oldest = event.oldest[i] if i < len(event.oldest) else seen.oldest
            if seen.attempt == 0 and 0 <= seen.oldest != oldest:  # of a later attempt either group may be meant
                what = f"its oldest token is of version {oldest}, its worker said {seen.oldest}"
                self._note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {what}")
            seen.lag = event.version - 1 - oldest if oldest >= 0 else -1
            if oldest >= event.version:
                self._note(
                    "versions", line, f"ticket {ticket_id} of version {oldest} trained at version {event.version}"
                )
            if self.opened is not None and self.opened.stale_policy == "drop" and seen.lag > self.opened.eta:
                behind = f"{seen.lag} versions behind, eta is {self.opened.eta}"
                self._note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {behind}")
            seen.version = event.version
            self._move(seen, "trained")

    def _rolled_back(self, event: RolledBack, line: int) -> None:
        if event.incarnation <= self.trainer_incarnation:
            self._note("versions", line, f"training side {event.incarnation} started after {self.trainer_incarnation}")
        reissued = 0
        for seen in self.tickets.values():
            if seen.state in _COUNTED or (seen.state == "trained" and seen.version > event.version):
                self._move(seen, "waiting")
                seen.version = seen.lag = seen.oldest = -1
                reissued += 1
        if reissued:
            self.causes["rolled back"] += reissued
        self.trainer_incarnation, self.newest, self.granted_at = event.incarnation, max(0, event.version), -1
        self.lost_steps.add(event.version)
        self.starts.append(RollBackRow(event.version, event.incarnation, reissued, event.time))

    def _snapshot(self, event: Snapshot) -> None:
        if problem := event.problem():
            self._note("journal", 1, problem)
            return
        self.compacted, self.records = event.records, event.records
        self.inherited, self.cursor, self.newest = event.inherited, event.cursor, max(0, event.newest)
        if event.opened is not None:
            self.opened, self.order = event.opened, PromptOrder(event.opened.seed, event.opened.prompts)
        if event.rolled_back is not None:
            last = event.rolled_back
            self.trainer_incarnation = last.incarnation
            self.lost_steps.add(last.version)
            self.starts.append(RollBackRow(last.version, last.incarnation, event.reissued, last.time))
        open_ = {ticket.ticket_id: ticket for ticket in event.open}
        for number, (code, attempt) in enumerate(zip(event.outcome, event.attempt, strict=True)):
            name = ticket_name(number)
            seen = self.tickets[name] = Seen(event.prompt[number], attempt=attempt, lag=event.lag[number])
            if code == -1 and (ticket := open_.get(name)):
                seen.state = ticket.state
            elif code >= 0:
                seen.state, seen.version = "trained", code
            elif code < -1:
                seen.state, seen.reason = "dropped", event.reasons[-2 - code]
            else:
                self._note("prompts", 1, f"ticket {name} is lost: neither open nor ended")
            self.states[seen.state] += 1
        self.attempts = len(event.attempt) + sum(event.attempt)
        self.causes.update(event.reissued_by_cause)
        self.given_back.extend(event.prompts)

    # -- the report --------------------------------------------------------------------------------------------------

    def compare_steps(self, logged: Mapping[int, Sequence[str]], recovered: Collection[int] = ()) -> None:
        """``logged``: the tickets of each step that the step log has and that no recovery undid; ``recovered``: the
        steps that one went back to.
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
                continue  # the trainer tells the ledger first; it is not there yet, or died in between
            if twice := len(logged.get(step, ())) - len(theirs):
                problems.append(f"step {step}: the step log names {twice} tickets twice")
            if missing := sorted(ours - theirs):
                problems.append(f"step {step}: not in the step log: ticket {', '.join(missing)}")
            if extra := sorted(theirs - ours):
                problems.append(f"step {step}: only in the step log: ticket {', '.join(extra)}")

    def report(self, *, torn_bytes: int = 0, skipped: Mapping[str, str] | None = None) -> AuditReport:
        """``skipped``: checks that could not be made, and why."""
        reasons = dict(skipped or {})
        states = {state: self.states[state] for state in (*OPEN_STATES, *ENDED)}
        replayed = self.ledger.counts.by_state()
        if not self.problems["replay"] and states != replayed:
            self.problems["replay"].append(f"the records lead to {states}, the manager's replay to {replayed}")
        if self.opened is None and not self.tickets:
            for name in ("staleness", "admission"):
                reasons.setdefault(name, "no record says what B and eta were")
        elif self.opened is not None and self.opened.stale_policy != "drop":
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

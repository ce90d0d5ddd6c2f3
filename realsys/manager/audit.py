"""Audit of a trial's ledger: a second opinion on its journal by independent rules. Pure: events in, report out.

    records of the journal ──observe──> per ticket: state, attempt, end ──┐
    train records of the step log ────────────────────────────────────────┴──report──> counts and checks

It shares only the records with ``Ledger``, so that a mistake there is found here; the last check compares its numbers
with the ledger's own replay. A problem never ends the audit: it is noted with its line.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from realsys.errors import LedgerError
from realsys.manager.ledger import events as e
from realsys.manager.ledger.events import Finished, Granted, Opened
from realsys.manager.ledger.ledger import STALE, Ledger
from realsys.manager.ledger.prompt_order import PromptOrder
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.ledger.tickets import OPEN_STATES, label, ticket_name

#: check -> claim that holds if the check is ok
CLAIMS = {
    "journal": "every record can be read, and none is missing before the last",
    "prompts": "every prompt position below the cursor was granted once, or passed over by the curriculum",
    "attempts": "one attempt of a ticket at a time, each after the loss of the one before",
    "ends": "no ticket ended twice (one-end)",
    "trained": "no ticket was trained twice, unless a roll-back lies between",
    "versions": "each version was trained once, in order, by the trainer that started last (monotonic)",
    "staleness": "nothing older than max_staleness was trained, or reissued too often for it (stale_policy=mask, drop)",
    "admission": "floor((N - 1) / B) <= v + eta at every grant",
    "steps": "the trainer's own record names the same tickets for each step",
    "replay": "the manager's replay accepts every record, and each ticket is in exactly one state",
}
ENDED = ("trained", "dropped")
_COUNTED = tuple(state for state in OPEN_STATES if state != "waiting")


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


class PromptAudit:
    """Position in the data, and the success rate of every prompt with a verdict, in per mille."""

    def __init__(self) -> None:
        self._order: PromptOrder | None = None
        self._curriculum: tuple[int, int, float] | None = None
        self._cursor = 0
        self._given_back: deque[int] = deque()  # prompts that may be granted again
        self._rates: dict[int, int] = {}
        self._by_script = False
        self._submitted: dict[int, int] = {}  # position -> prompt, until it is granted
        self._total = 0  # positions that the script has submitted

    def open(self, event: Opened) -> None:
        """Take the settings that decide the order."""
        self._order = PromptOrder(event.seed, event.prompts)
        self._curriculum = event.curriculum
        self._by_script = event.order == "script"

    def start(
        self, cursor: int, given_back: Sequence[int], rates: Sequence[int], submitted: Sequence[int] = ()
    ) -> None:
        """Begin at the position of a checkpoint or a snapshot. ``submitted``: prompts from ``cursor`` on."""
        self._cursor = self._total = cursor
        self._submit(submitted)
        self._given_back.extend(given_back)
        self._rates = {prompt: rate for prompt, rate in enumerate(rates) if rate >= 0}

    def submitted(self, event: e.Submitted) -> str:
        """Take prompts of the training script. Returns why they cannot be the next ones, "" if they are."""
        if not self._by_script:
            return "prompts submitted, but their order is that of the seed"
        if event.start != self._total:
            return f"prompts submitted from position {event.start} on, and the next one is {self._total}"
        self._submit(event.prompts)
        return ""

    def _submit(self, prompts: Sequence[int]) -> None:
        self._submitted |= dict(enumerate(prompts, self._total))
        self._total += len(prompts)

    def finished(self, prompt: int, event: Finished) -> None:
        """Average the success rate of a group with that of its prompt's groups before."""
        if event.judged:
            rate = round(1000 * event.correct / event.judged)
            before = self._rates.get(prompt)
            self._rates[prompt] = rate if before is None else (before + rate + (rate > before)) // 2

    def granted(self, event: Granted) -> str:
        """Take the prompt of a new ticket. Returns why it is the wrong one, "" if it is right."""
        if event.position < 0:
            if event.prompt_index not in self._given_back:
                return f"prompt {event.prompt_index} was not given back"
            self._given_back.remove(event.prompt_index)
            return ""
        problem = self._misplaced(event)
        self._cursor = max(self._cursor, event.position + 1)
        return problem

    def _misplaced(self, event: Granted) -> str:
        if event.position < self._cursor:
            return f"prompt position {event.position} was granted before"
        if passed := self._wrongly_passed(event.position):
            return f"prompt position {event.position} was granted before {passed[0]}"
        if self._order is None:
            return ""
        right = self._submitted.pop(event.position, None) if self._by_script else self._order.at(event.position)
        return f"prompt {event.prompt_index} instead of {right}" if right != event.prompt_index else ""

    def _wrongly_passed(self, position: int) -> list[int]:
        """Return the positions before ``position`` that the curriculum, if there is one, had to take."""
        passed = range(self._cursor, position)
        if not passed or self._curriculum is None or self._order is None:
            return list(passed[:1])
        low, high, _ = self._curriculum
        rates = ((at, self._rates.get(self._order.at(at) or 0)) for at in passed)
        return [at for at, rate in rates if rate is None or low <= rate <= high]


@dataclass
class Auditor:
    """State of an audit. Feed it every record with its line, then take the ``report``.

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
    ledger: Ledger = field(default_factory=Ledger.replaying)

    def observe(self, event: e.Event, line: int) -> None:
        """Check the next record."""
        self.records += 1
        match event:
            case e.Granted():
                self._granted(event, line)
            case e.Finished():
                self._finished(event, line)
            case e.Claimed():
                self._claimed(event, line)
            case e.Trained():
                self._trained(event, line)
            case e.Reissued():
                self._lost(event.ticket_id, event.attempt, label(event.cause), line)
            case e.Dropped():
                seen = self._current(event.ticket_id, None, f"dropped ({event.reason})", line)
                if seen is not None:
                    seen.reason = label(event.reason)
                    self._move(seen, "dropped")
            case e.RolledBack():
                self._rolled_back(event, line)
            case e.Opened():
                self.opened = event
                self.prompts.open(event)
            case e.Resumed():
                self.inherited = event.groups
                self.newest = event.step
                self.prompts.start(event.cursor, event.pending, event.rates)
            case e.Submitted():
                if problem := self.prompts.submitted(event):
                    self._note("prompts", line, problem)
            case e.Snapshot():
                self._snapshot(event)
            case _:
                return  # evaluations and pins are outside the quota
        if not self.problems["replay"]:
            try:
                self.ledger.apply(event)  # type: ignore[arg-type]  # observe() has returned for events of evaluations
            except LedgerError as error:
                self._note("replay", line, str(error))

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
                reasons.setdefault(name, "no record says what the bound was")
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

    def _note(self, check: str, line: int, text: str) -> None:
        """Add a problem of the record in ``line``."""
        self.problems[check].append(f"line {line}: {text}")

    def _move(self, seen: Seen, state: str) -> None:
        """Count a ticket in another state."""
        self.states[seen.state] -= 1
        self.states[state] += 1
        seen.state = state

    def _current(self, ticket_id: str, attempt: int | None, what: str, line: int) -> Seen | None:
        """Return the open ticket of a record. Notes a problem, and returns None, if it is unknown or has ended."""
        seen = self.tickets.get(ticket_id)
        if seen is None:
            self._note("attempts", line, f"ticket {ticket_id} {what}, but never granted")
        elif seen.state in ENDED:
            self._note("ends", line, f"ticket {ticket_id} {what} after it was {seen.state}")
            return None
        elif attempt is not None and attempt != seen.attempt:
            self._note("attempts", line, f"ticket {ticket_id}: attempt {attempt} {what}, but {seen.attempt} is current")
        return seen

    def _granted(self, event: e.Granted, line: int) -> None:
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
        # a version may be published before its /trained call, but not its successor
        if event.version < self.granted_at:
            self._note("versions", line, f"ticket {event.ticket_id} granted at {event.version} after {self.granted_at}")
        elif event.version > self.newest + 1:
            what = f"at version {event.version}, and {self.newest} is the newest that was trained"
            self._note("versions", line, f"ticket {event.ticket_id} granted {what}")
        self.granted_at = event.version
        if self.opened is None:
            self._note("admission", line, f"ticket {event.ticket_id} granted before any record says what the bound is")
        else:
            counted = self.inherited + sum(self.states[state] for state in (*_COUNTED, "trained"))
            bound = StalenessBound(self.opened.batch_groups, self.opened.eta)
            if not bound.admits(counted, event.version):
                limit = f"{bound.capacity(event.version)} at version {event.version}"
                self._note("admission", line, f"ticket {event.ticket_id} granted as number {counted}, beyond {limit}")

    def _new(self, event: e.Granted, line: int) -> None:
        if event.ticket_id != ticket_name(len(self.tickets)):
            following = ticket_name(len(self.tickets))
            self._note("prompts", line, f"ticket {event.ticket_id} granted where {following} was the next: one is lost")
        if event.attempt:
            self._note("attempts", line, f"ticket {event.ticket_id} begins with attempt {event.attempt}")
        self.tickets[event.ticket_id] = Seen(event.prompt_index, attempt=event.attempt)
        self.states["running"] += 1
        if problem := self.prompts.granted(event):
            self._note("prompts", line, f"ticket {event.ticket_id}: {problem}")

    def _finished(self, event: e.Finished, line: int) -> None:
        seen = self._current(event.ticket_id, event.attempt, f"finished ({event.outcome})", line)
        if seen is None:
            return
        if seen.state != "running":
            self._note("attempts", line, f"ticket {event.ticket_id} finished, though it was {seen.state}")
        self.prompts.finished(seen.prompt, event)
        if event.outcome == "accepted":
            seen.oldest = event.version_min
            self._move(seen, "finished")
        elif event.outcome == "failed" and event.retry:
            self.causes["failed"] += 1
            self._move(seen, "waiting")
        else:
            seen.reason = f"{event.outcome} {label(event.reason)}" if event.reason else event.outcome
            self._move(seen, "dropped")

    def _lost(self, ticket_id: str, attempt: int, cause: str, line: int) -> None:
        seen = self._current(ticket_id, attempt, f"reissued ({cause})", line)
        if seen is not None:
            if seen.state in ("waiting", "claimed"):
                self._note("attempts", line, f"ticket {ticket_id} reissued ({cause}) while it was {seen.state}")
            self.causes[cause] += 1
            self._move(seen, "waiting")
            seen.stale += cause == STALE
            if cause == STALE and self.opened is not None and seen.stale > self.opened.max_reissues:
                what = f"reissued {seen.stale} times as too old, and the bound is"
                self._note("staleness", line, f"ticket {ticket_id} {what} {self.opened.max_reissues}")

    def _claimed(self, event: e.Claimed, line: int) -> None:
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
            self._note("versions", line, f"{what} version {version} by trainer {ours}")

    def _trained(self, event: e.Trained, line: int) -> None:
        self._by_whom("trained", event.version, event.incarnation, line)
        if event.version != self.newest + 1:
            self._note("versions", line, f"version {event.version} trained after version {self.newest}")
        self.newest = event.version
        batch = 0 if self.opened is None or self.opened.order == "none" else self.opened.batch_groups
        if self.opened is not None and len(event.tickets) != batch:
            what = f"{len(event.tickets)} groups, a batch has {batch}"
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
            # Two attempts may have arrived: the trainer chose one. It may also have masked the oldest tokens.
            masks = self.opened is not None and self.opened.stale_policy != "train"
            if seen.attempt == 0 and seen.oldest >= 0 and (oldest < seen.oldest if masks else oldest != seen.oldest):
                what = f"its oldest token is of version {oldest}, its worker said {seen.oldest}"
                self._note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {what}")
            seen.lag = event.version - 1 - oldest if oldest >= 0 else -1
            if oldest >= event.version:
                self._note(
                    "versions", line, f"ticket {ticket_id} of version {oldest} trained at version {event.version}"
                )
            if self.opened is not None and masks and seen.lag > self.opened.eta:
                behind = f"{seen.lag} versions behind, max_staleness is {self.opened.eta}"
                self._note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {behind}")
            seen.version = event.version
            self._move(seen, "trained")

    def _rolled_back(self, event: e.RolledBack, line: int) -> None:
        if event.incarnation <= self.trainer_incarnation:
            self._note("versions", line, f"trainer {event.incarnation} started after {self.trainer_incarnation}")
        reissued = 0
        for seen in self.tickets.values():
            if seen.state in _COUNTED or (seen.state == "trained" and seen.version > event.version):
                self._move(seen, "waiting")
                seen.version = -1
                seen.lag = -1
                seen.oldest = -1
                reissued += 1
        if reissued:
            self.causes["rolled back"] += reissued
        self.trainer_incarnation = event.incarnation
        self.newest = max(0, event.version)
        self.granted_at = -1
        self.lost_steps.add(event.version)
        self.starts.append(RollBackRow(event.version, event.incarnation, reissued, event.time))

    def _snapshot(self, event: e.Snapshot) -> None:
        if problem := event.problem():
            self._note("journal", 1, problem)
            return
        self.compacted, self.records = event.records, event.records
        self.inherited = event.inherited
        self.newest = max(0, event.newest)
        if event.opened is not None:
            self.opened = event.opened
            self.prompts.open(event.opened)
        if event.rolled_back is not None:
            last = event.rolled_back
            self.trainer_incarnation = last.incarnation
            self.lost_steps.add(last.version)
            self.starts.append(RollBackRow(last.version, last.incarnation, event.reissued, last.time))
        open_ = {ticket.ticket_id: ticket for ticket in event.open}
        for number, (code, attempt) in enumerate(zip(event.outcome, event.attempt, strict=True)):
            name = ticket_name(number)
            seen = self.tickets[name] = Seen(event.prompt[number], attempt=attempt, lag=event.lag[number])
            seen.stale = event.stale[number] if event.stale else 0
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
        self.prompts.start(event.cursor, event.prompts, event.rates, event.submitted)

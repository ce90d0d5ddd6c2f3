"""Audit of a trial's ledger: a second opinion on its journal by independent rules. Pure: events in, report out.

    records of the journal ──observe──> per ticket: state, attempt, end ──┐
    train records of the step log ────────────────────────────────────────┴──report──> counts and checks

It shares only the records with ``Ledger``, so that a mistake there is found here; the last check compares its numbers
with the ledger's own replay. A problem never ends the audit: it is noted with its line.
"""

from __future__ import annotations

from realsys.errors import LedgerError
from realsys.manager.audit.audit_report import RollBackRow
from realsys.manager.audit.audit_tally import ENDED, AuditTally, Seen
from realsys.manager.ledger import events as e
from realsys.manager.ledger.ledger_state import STALE
from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.ledger.tickets import OPEN_STATES, label, ticket_name

_COUNTED = tuple(state for state in OPEN_STATES if state != "waiting")


class Auditor(AuditTally):
    """Feed it every record with its line, then take the ``report``."""

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
                self._dropped(event, line)
            case e.RolledBack():
                self._rolled_back(event, line)
            case e.Opened():
                self.opened = event
                self.prompts.open(event)
            case e.Resumed():
                self.inherited = event.groups
                self.newest = event.step
                self.prompts.start(event.cursor, event.pending, event.rates)
            case e.Snapshot():
                self._snapshot(event)
            case _:
                return  # evaluations are outside the quota
        self._replay(event, line)

    def _replay(self, event: e.Event, line: int) -> None:
        if not self.problems["replay"]:
            try:
                self.ledger.apply(event)  # type: ignore[arg-type]  # observe() has returned for events of evaluations
            except LedgerError as error:
                self.note("replay", line, str(error))

    def _granted(self, event: e.Granted, line: int) -> None:
        seen = self.tickets.get(event.ticket_id)
        self.attempts += 1
        if seen is None:
            self._new(event, line)
        else:
            if seen.state in ENDED:
                self.note("ends", line, f"ticket {event.ticket_id} granted again after it was {seen.state}")
            elif seen.state != "waiting" or event.attempt != seen.attempt + 1:
                was = f"attempt {seen.attempt} was {seen.state}"
                self.note("attempts", line, f"ticket {event.ticket_id}: attempt {event.attempt} granted while {was}")
            if event.prompt_index != seen.prompt:
                what = f"granted again with prompt {event.prompt_index} instead of {seen.prompt}"
                self.note("prompts", line, f"ticket {event.ticket_id} {what}")
            seen.attempt, seen.oldest = event.attempt, -1
            self.move(seen, "running")
        self._granted_at(event, line)
        if self.opened is None:
            self.note("admission", line, f"ticket {event.ticket_id} granted before any record says what B and eta are")
        else:
            counted = self.inherited + sum(self.states[state] for state in (*_COUNTED, "trained"))
            bound = StalenessBound(self.opened.batch_groups, self.opened.eta)
            if not bound.admits(counted, event.version):
                limit = f"{bound.capacity(event.version)} at version {event.version}"
                self.note("admission", line, f"ticket {event.ticket_id} granted as number {counted}, beyond {limit}")

    def _granted_at(self, event: e.Granted, line: int) -> None:
        """Check the version of a grant: it may be published before its /trained call, but not its successor."""
        if event.version < self.granted_at:
            self.note("versions", line, f"ticket {event.ticket_id} granted at {event.version} after {self.granted_at}")
        elif event.version > self.newest + 1:
            what = f"at version {event.version}, and {self.newest} is the newest that was trained"
            self.note("versions", line, f"ticket {event.ticket_id} granted {what}")
        self.granted_at = event.version

    def _new(self, event: e.Granted, line: int) -> None:
        if event.ticket_id != ticket_name(len(self.tickets)):
            following = ticket_name(len(self.tickets))
            self.note("prompts", line, f"ticket {event.ticket_id} granted where {following} was the next: one is lost")
        if event.attempt:
            self.note("attempts", line, f"ticket {event.ticket_id} begins with attempt {event.attempt}")
        self.tickets[event.ticket_id] = Seen(event.prompt_index, attempt=event.attempt)
        self.states["running"] += 1
        if problem := self.prompts.granted(event):
            self.note("prompts", line, f"ticket {event.ticket_id}: {problem}")

    def _finished(self, event: e.Finished, line: int) -> None:
        seen = self.current(event.ticket_id, event.attempt, f"finished ({event.outcome})", line)
        if seen is None:
            return
        if seen.state != "running":
            self.note("attempts", line, f"ticket {event.ticket_id} finished, though it was {seen.state}")
        self.prompts.finished(seen.prompt, event)
        if event.outcome == "accepted":
            seen.oldest = event.version_min
            self.move(seen, "finished")
        elif event.outcome == "failed" and event.retry:
            self.causes["failed"] += 1
            self.move(seen, "waiting")
        else:
            seen.reason = f"{event.outcome} {label(event.reason)}" if event.reason else event.outcome
            self.move(seen, "dropped")

    def _dropped(self, event: e.Dropped, line: int) -> None:
        seen = self.current(event.ticket_id, None, f"dropped ({event.reason})", line)
        if seen is not None:
            seen.reason = label(event.reason)
            self.move(seen, "dropped")

    def _lost(self, ticket_id: str, attempt: int, cause: str, line: int) -> None:
        seen = self.current(ticket_id, attempt, f"reissued ({cause})", line)
        if seen is not None:
            if seen.state in ("waiting", "claimed"):
                self.note("attempts", line, f"ticket {ticket_id} reissued ({cause}) while it was {seen.state}")
            self.causes[cause] += 1
            self.move(seen, "waiting")
            seen.stale += cause == STALE
            if cause == STALE and self.opened is not None and seen.stale > self.opened.max_reissues:
                what = f"reissued {seen.stale} times as too old, and asynchronous.max_reissues is"
                self.note("staleness", line, f"ticket {ticket_id} {what} {self.opened.max_reissues}")

    def _claimed(self, event: e.Claimed, line: int) -> None:
        self._by_whom("claimed for", event.version, event.incarnation, line)
        if event.version != self.newest + 1:
            self.note("versions", line, f"tickets claimed for version {event.version} after version {self.newest}")
        for ticket_id in event.tickets:
            seen = self.current(ticket_id, None, f"claimed for version {event.version}", line)
            if seen is not None:
                if seen.state == "claimed":
                    self.note("attempts", line, f"ticket {ticket_id} claimed twice for version {event.version}")
                self.move(seen, "claimed")

    def _by_whom(self, what: str, version: int, incarnation: str, line: int) -> None:
        if self.starts and incarnation != self.trainer_incarnation:
            ours = f"{incarnation or 'unknown'}, while {self.trainer_incarnation} had started"
            self.note("versions", line, f"{what} version {version} by trainer {ours}")

    def _trained(self, event: e.Trained, line: int) -> None:
        self._by_whom("trained", event.version, event.incarnation, line)
        if event.version != self.newest + 1:
            self.note("versions", line, f"version {event.version} trained after version {self.newest}")
        self.newest = event.version
        if self.opened is not None and len(event.tickets) != self.opened.batch_groups:
            what = f"{len(event.tickets)} groups, a batch has {self.opened.batch_groups}"
            self.note("versions", line, f"version {event.version} trained on {what}")
        for i, ticket_id in enumerate(event.tickets):
            seen = self.tickets.get(ticket_id)
            if seen is None:
                self.note("attempts", line, f"ticket {ticket_id} trained at version {event.version}, never granted")
                continue
            if seen.state == "trained":
                times = f"at version {seen.version} and again at {event.version}"
                self.note("trained", line, f"ticket {ticket_id} trained {times}")
            elif seen.state == "dropped":
                self.note("ends", line, f"ticket {ticket_id} trained at version {event.version} after it was dropped")
            elif seen.state != "claimed":
                what = f"trained at version {event.version}, though it was {seen.state}, not claimed"
                self.note("attempts", line, f"ticket {ticket_id} {what}")
            oldest = event.oldest[i] if i < len(event.oldest) else seen.oldest
            # Two attempts may have arrived: the trainer chose one. It may also have masked the oldest tokens.
            masks = self.opened is not None and self.opened.stale_policy != "train"
            if seen.attempt == 0 and seen.oldest >= 0 and (oldest < seen.oldest if masks else oldest != seen.oldest):
                what = f"its oldest token is of version {oldest}, its worker said {seen.oldest}"
                self.note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {what}")
            seen.lag = event.version - 1 - oldest if oldest >= 0 else -1
            if oldest >= event.version:
                self.note(
                    "versions", line, f"ticket {ticket_id} of version {oldest} trained at version {event.version}"
                )
            if self.opened is not None and masks and seen.lag > self.opened.eta:
                behind = f"{seen.lag} versions behind, eta is {self.opened.eta}"
                self.note("staleness", line, f"ticket {ticket_id} trained at version {event.version}: {behind}")
            seen.version = event.version
            self.move(seen, "trained")

    def _rolled_back(self, event: e.RolledBack, line: int) -> None:
        if event.incarnation <= self.trainer_incarnation:
            self.note("versions", line, f"trainer {event.incarnation} started after {self.trainer_incarnation}")
        reissued = 0
        for seen in self.tickets.values():
            if seen.state in _COUNTED or (seen.state == "trained" and seen.version > event.version):
                self.move(seen, "waiting")
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
            self.note("journal", 1, problem)
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
                self.note("prompts", 1, f"ticket {name} is lost: neither open nor ended")
            self.states[seen.state] += 1
        self.attempts = len(event.attempt) + sum(event.attempt)
        self.causes.update(event.reissued_by_cause)
        self.prompts.start(event.cursor, event.prompts, event.rates)

"""The life of a small trial as manager and trainer write it, for tests that read the ledger."""

import json
from pathlib import Path

import msgspec

from realsys.cluster.journal import encode_records
from realsys.config.paths import TrialPaths
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import Event
from realsys.manager.ledger.tickets import ticket_ranges
from realsys.manager.messages import AllocateRequest, ClaimRequest, FinishRequest, RollBackRequest, TrainedRequest
from realsys.types import PublishedVersion, Ticket
from tests.support.ledger.manager_states import ANSWER, SETTINGS, address, update

A, B = (f"{number:019d}" for number in (1, 2))


class Run:
    """A trial as manager and trainer write it, without either of their processes."""

    def __init__(self) -> None:
        self.state, self.steps, self.now = ManagerState(SETTINGS), [], 0.0  # type: ignore[var-annotated]
        self.state.open(self.now)
        self.state.observe_servers([address(0)])

    def start(self, version: int, incarnation: str) -> None:
        self.incarnation = incarnation
        self.state.roll_back(RollBackRequest(version, version, incarnation, "/c"), self.now)
        if version >= 0:
            self.steps.append({"kind": "recovered", "step": version, "incarnation": incarnation})
        self.publish(max(0, version))

    def publish(self, version: int) -> None:
        assert self.state.servers.publish(PublishedVersion(version, self.incarnation, f"/v{version}", version))
        update(self.state, 0)

    def grant(self, count: int) -> list[Ticket]:
        self.now += 1
        granted = self.state.allocate(AllocateRequest("w", count), self.now).tickets
        assert len(granted) == count
        return granted

    def finish(self, ticket: Ticket, outcome: str = "accepted", reason: str = "", oldest: int = 0) -> None:
        answer = msgspec.structs.replace(ANSWER, version_min=oldest)
        request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason, [answer])  # type: ignore[arg-type]
        assert self.state.finish(request, self.now).known

    def train(self, step: int, batch: list[Ticket], oldest: list[int]) -> None:
        ids = [ticket.ticket_id for ticket in batch]
        self.state.claim(ClaimRequest(step, ids, self.incarnation), self.now)
        request = TrainedRequest(step, step, ids, incarnation=self.incarnation, oldest=oldest)
        self.state.trained(request, self.now)
        self.steps.append({"kind": "train", "step": step, "tickets": ticket_ranges(ids)})
        self.publish(step)

    def drop(self, ticket: Ticket, reason: str) -> None:
        request = TrainedRequest(0, 0, dropped=[(ticket.ticket_id, reason)], incarnation=self.incarnation)
        self.state.trained(request, self.now)


def life() -> Run:
    """Two steps, a drop, a lost and a failed attempt, a roll-back to version 1 and step 2 once more."""
    run = Run()
    run.start(-1, A)
    first, second, third, fourth = run.grant(4)
    for ticket in (first, second, third):
        run.finish(ticket)
    run.train(1, [first, second], [0, 0])
    run.finish(fourth, "failed", "verifier died: 9")
    [fourth] = run.grant(1)
    run.state.outbox += run.state.ledger.lose(lambda t: t.ticket_id == fourth.ticket_id, "worker lost", run.now)
    fourth, fifth = run.grant(2)
    run.drop(third, "success_rate")
    run.finish(fourth)
    run.finish(fifth, oldest=1)
    run.train(2, [fourth, fifth], [1, 1])
    run.start(1, B)
    again = run.grant(2)
    for ticket in again:
        run.finish(ticket)
    run.train(2, again, [1, 0])
    [last] = run.grant(1)
    run.finish(last, "rejected", "too easy")
    return run


def write(folder: Path, events: list[Event], steps: list[dict[str, object]]) -> TrialPaths:
    paths = TrialPaths(folder)
    paths.ledger.write_bytes(encode_records(events)[0])
    paths.steps.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return paths


def index(events: list[Event], kind: type, last: bool = False) -> int:
    found = [i for i, event in enumerate(events) if isinstance(event, kind)]
    return found[-1 if last else 0]

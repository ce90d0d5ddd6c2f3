"""A ManagerState to test: made, brought to where tickets are granted, and driven in one line a thing."""

import dataclasses
from typing import Any

from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.messages import (
    AllocateRequest,
    Answer,
    ClaimReply,
    ClaimRequest,
    FinishRequest,
    RollBackReply,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.routing.servers import Probe, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress, Ticket

SETTINGS = ManagerSettings(2, 1, 4, 2, 1, {"train": 10, "eval": 3}, stale_policy="drop")
ANSWER = Answer(5.0, True, 30, "stop", 0, 0)


def version(number: int) -> PublishedVersion:
    return PublishedVersion(number, "m", f"/v{number}", number)


def address(index: int, incarnation: str = "1") -> ServerAddress:
    return ServerAddress(f"generation_server/{index}", f"http://h:{index}", 1, "h", incarnation)


def order(state: ManagerState, index: int, now: float = 0.0, incarnation: str = "1") -> UpdateOrder:
    made = state.next_order(f"generation_server/{index}", incarnation, now)
    assert isinstance(made, UpdateOrder)
    return made


def update(state: ManagerState, index: int, now: float = 0.0) -> None:
    made = order(state, index, now)
    assert state.begin_update(made, 0.0)
    assert state.servers.succeeded(made, 0.1, {"pause_s": 0.002})


def answer(state: ManagerState, index: int, number: int, now: float = 0.0) -> list[str]:
    """Let the server answer its probe: it serves version ``number``. Returns the workers that are suspects since."""
    probe = state.servers.next_probe(f"generation_server/{index}", "1", now)
    return state.servers.answered(probe, str(number), f"/v{number}", now) if isinstance(probe, Probe) else []


def ready(servers: int = 1, **changes: Any) -> ManagerState:
    state = ManagerState(dataclasses.replace(SETTINGS, **changes))
    state.observe_servers([address(index) for index in range(servers)])
    state.servers.publish(version(0))
    for index in range(servers):
        update(state, index)
    return state


def tickets(state: ManagerState, count: int = 1, now: float = 0.0) -> list[Ticket]:
    return state.allocate(AllocateRequest("w", count), now).tickets


def place(state: ManagerState, ticket: Ticket, **more: Any) -> ScheduleReply:
    return state.schedule(ScheduleRequest(ticket.ticket_id, ticket.attempt, 10, 20, ticket.n, **more), 0.0)


def finish(state: ManagerState, ticket: Ticket, outcome: Any = "accepted", answers: int = 1) -> None:
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, "", [ANSWER] * answers), 0.0)


# ---- A ManagerState and what training sides say to it, in one line a thing


A, B, C = (f"{number:019d}" for number in (1, 2, 10))


def start(state: ManagerState, version: int, incarnation: str, now: float = 0.0) -> int:
    reply = state.roll_back(RollBackRequest(version, version, incarnation, f"/c/{version}"), now)
    assert isinstance(reply, RollBackReply)
    return reply.reissued


def published(number: int, incarnation: str) -> PublishedVersion:
    return PublishedVersion(number, incarnation, f"/v{number}.{incarnation}", number)


def trained(state: ManagerState, version: int, ids: list[str], incarnation: str, **more: object) -> TrainedReply:
    assert state.claim(ClaimRequest(version, ids, incarnation), 0.0) == ClaimReply([])
    request = TrainedRequest(version, version, ids, incarnation=incarnation, **more)  # type: ignore[arg-type]
    reply = state.trained(request, 0.0)
    assert isinstance(reply, TrainedReply)
    return reply


def running(incarnation: str = A) -> ManagerState:
    """A new trial whose training side has started and published, with one server that has verified it."""
    state = ManagerState(SETTINGS)
    state.open(0.0)
    state.observe_servers([address(0)])
    assert start(state, -1, incarnation) == 0
    assert state.servers.publish(published(0, incarnation))
    update(state, 0)
    return state


def serve(state: ManagerState, number: int, incarnation: str) -> None:
    assert state.servers.publish(published(number, incarnation))
    update(state, 0)


def replayed(state: ManagerState) -> ManagerState:
    again = ManagerState(state.settings)
    again.restore_from(state.outbox)
    return again

"""A ManagerState and what training sides say to it, in one line a thing."""

from realsys.manager.decisions import ManagerState
from realsys.manager.messages import (
    ClaimReply,
    ClaimRequest,
    RollBackReply,
    RollBackRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.types import PublishedVersion
from tests.support.ledger.manager_states import SETTINGS, address, update

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

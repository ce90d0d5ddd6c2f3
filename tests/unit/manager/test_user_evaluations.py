"""Evaluations that a user requests from a trial in training."""

from __future__ import annotations

import pytest

from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.pinned_evaluations import MOST_RESTARTS
from realsys.manager.messages import BadCall, CancelRequest, EvaluateRequest, EvaluationReply, NotFound, NotRunning
from realsys.types import Ticket
from tests.support.ledger.manager_states import finish, place, tickets, update
from tests.support.training.training_sides import A, B, published, replayed, running, start

ID = "user-1-eval"


def asked(state: ManagerState, problems: int = 2, incarnation: str = "", *, by_user: bool = True) -> None:
    state.evaluate(EvaluateRequest(ID, "eval", problems, incarnation=incarnation, by_user=by_user), 0.0)


def reply(state: ManagerState) -> EvaluationReply:
    return state.evaluations.find(ID).reply()


def evaluated(state: ManagerState, count: int) -> list[Ticket]:
    return [ticket for ticket in tickets(state, count) if ticket.kind == "eval"]


def cancel(state: ManagerState) -> bool:
    return state.cancel_evaluation(CancelRequest(ID), 1.0).cancelled


def test_user_needs_no_incarnation() -> None:
    state = running()
    asked(state)
    for ticket in evaluated(state, 2):
        finish(state, ticket)
    assert reply(state).ended and reply(state).accuracy == 1.0


def test_trainer_never_sees_evaluations_of_users() -> None:
    """A trainer repeats every evaluation that it finds without a result."""
    state = running()
    asked(state)
    start(state, 0, B)
    assert state.evaluations.ever_started() == []


def test_cancelled_evaluation_ends_without_numbers() -> None:
    state = running()
    asked(state)
    [first, second] = evaluated(state, 2)
    place(state, second)
    finish(state, first)
    assert cancel(state)
    assert (reply(state).ended, reply(state).incomplete, reply(state).accuracy) == (True, "cancelled by its user", None)
    assert state.reservations.tickets() == []
    with pytest.raises(NotRunning):
        place(state, second)
    assert replayed(state).evaluations.snapshot() == state.evaluations.snapshot()


def test_cancelled_evaluation_grants_nothing_more() -> None:
    state = running()
    asked(state)
    cancel(state)
    assert evaluated(state, 4) == []
    assert not cancel(state), "a second call changes nothing"


def test_evaluation_of_the_trainer_cannot_be_cancelled() -> None:
    state = running()
    asked(state, incarnation=A, by_user=False)
    with pytest.raises(BadCall, match="requested by the trainer"):
        cancel(state)


def test_unknown_evaluation_cannot_be_cancelled() -> None:
    with pytest.raises(NotFound):
        cancel(running())


def test_roll_back_begins_it_again_with_new_weights() -> None:
    state = running()
    asked(state)
    finish(state, evaluated(state, 1)[0])
    start(state, 0, B)
    assert not reply(state).ended and (reply(state).done, reply(state).restarts) == (0, 1)
    assert evaluated(state, 2) == [], "the weights are not published yet"
    state.servers.publish(published(0, B))
    update(state, 0)
    again = evaluated(state, 2)
    assert {ticket.attempt for ticket in again} != {0}, "no attempt number comes twice"
    for ticket in again:
        finish(state, ticket)
    assert reply(state).accuracy == 1.0
    assert replayed(state).evaluations.snapshot() == state.evaluations.snapshot()


def test_finished_evaluation_survives_a_roll_back() -> None:
    state = running()
    asked(state)
    for ticket in evaluated(state, 2):
        finish(state, ticket)
    start(state, 0, B)
    assert reply(state).accuracy == 1.0 and reply(state).restarts == 0


def test_trainer_that_never_stays_ends_it_incomplete() -> None:
    state = running()
    asked(state)
    for number in range(MOST_RESTARTS + 1):
        start(state, 0, f"{int(B) + number:019d}")
    assert reply(state).ended and "the trainer went back to version 0" in reply(state).incomplete

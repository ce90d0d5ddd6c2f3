"""Calls of the trainer: journal records of /trained and /finish_rollout, repetitions, bounds of numbers."""

from __future__ import annotations

import msgspec
import pytest

from realsys.manager.ledger.events import Trained
from realsys.manager.messages import (
    FinishRequest,
    TrainedReply,
    TrainedRequest,
)
from tests.support.ledger.manager_states import ANSWER, tickets
from tests.support.training.training_sides import A, running, trained


def test_oldest_versions_are_journalled_once() -> None:
    state = running()
    ids = [ticket.ticket_id for ticket in tickets(state, 3)]
    trained(state, 1, ids[:1], A, oldest=[0])
    reply = trained(state, 2, ids[1:], A, oldest=[1, 0])
    assert reply.trained == 2
    event = state.outbox[-1]
    assert isinstance(event, Trained) and (event.tickets, event.oldest, event.incarnation) == (ids[1:], [1, 0], A)
    again = state.trained(TrainedRequest(2, 2, ids[1:], incarnation=A, oldest=[1, 0]), 0.0)
    assert again == TrainedReply(0, 0, in_use=[0]) and state.outbox[-1] is event
    with pytest.raises(ValueError, match="oldest has 1 versions for 3"):
        state.trained(TrainedRequest(3, 3, ids, incarnation=A, oldest=[0]), 0.0)


def test_a_step_that_is_told_again_shows_once() -> None:
    """Its first reply was lost."""
    state = running()
    for version in (1, 1, 2):
        trained(state, version, [], A, staleness={"0": version})
    assert [(step.version, step.histogram) for step in state.staleness] == [(1, {"0": 1}), (2, {"0": 2})]


def test_tokens_of_failed_episodes_reach_the_trainer() -> None:
    state = running()
    [ticket] = tickets(state, 1)
    lost = {"lost_tokens": {"failed": [70], "not_kept": [5, 100]}, "verdict_failures": {"raised": 1}}
    finish = FinishRequest(ticket.ticket_id, ticket.attempt, "w", "failed", **lost)
    for _ in range(2):
        state.finish(finish, 0.0)
    reply = trained(state, 1, [], A)
    assert reply.lost_tokens == {"failed": 70, "not_kept": 105}, "a repetition counts once"
    assert (reply.lost_lengths, reply.verdict_failures) == ({5: 1, 100: 1}, {"raised": 1})


@pytest.mark.parametrize(
    "body", [{"version": -1}, {"version": 1 << 31}, {"version": 1, "trained": ["0000000000"], "oldest": [1 << 31]}]
)
def test_numbers_that_no_ledger_can_hold_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"step": 1} | body), type=TrainedRequest)


def test_finished_tells_the_versions_of_the_answers() -> None:
    state = running()
    first, second = tickets(state, 2)
    answers = [type(ANSWER)(0.0, False, 3, "stop", low, high) for low, high in ((2, 3), (1, 2))]
    state.finish(FinishRequest(first.ticket_id, 0, "w", "accepted", "", answers), 0.0)
    state.finish(FinishRequest(second.ticket_id, 0, "w", "failed", "x"), 0.0)
    versions = [(e.version_min, e.version_max) for e in state.outbox[-2:]]  # type: ignore[union-attr]
    assert versions == [(1, 3), (-1, -1)]

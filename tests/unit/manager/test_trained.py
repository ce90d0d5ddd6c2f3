"""What the trainer tells the manager: claims, what was trained or dropped, what it holds; each may come twice."""

from __future__ import annotations

import msgspec
import pytest

from realsys.manager.ledger.events import Claimed, Reissued, Trained
from realsys.manager.messages import (
    ClaimReply,
    ClaimRequest,
    FinishRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.refusals import NotRunning, OlderTraining
from realsys.manager.state import ARRIVAL_GRACE_S, ManagerState
from tests.support.ledger.manager_states import ANSWER, SETTINGS, finish, place, schedule, tickets
from tests.support.training.training_sides import A, B, C, running, start, trained


def test_trained_of_an_older_training_side_is_refused_and_changes_nothing() -> None:
    state = running()
    [ticket] = tickets(state)
    finish(state, ticket)
    start(state, 0, B)
    for speaker in (A, ""):
        request = TrainedRequest(1, 1, [ticket.ticket_id], [(ticket.ticket_id, "stale")], incarnation=speaker, held=[])
        refused = state.trained(request, 1e6)
        assert isinstance(refused, OlderTraining) and B in refused.problem
    assert state.ledger.counts.open["waiting"] == 1
    with pytest.raises(ValueError, match=f"{C} has not called /roll_back"):
        state.trained(TrainedRequest(1, 1, incarnation=C), 0.0)


def test_oldest_goes_to_the_journal_for_what_is_new_and_must_match_in_number() -> None:
    state = running()
    ids = [ticket.ticket_id for ticket in tickets(state, 3)]
    trained(state, 1, ids[:1], A, oldest=[0])
    reply = trained(state, 2, ids[1:], A, oldest=[1, 0])
    assert reply.trained == 2
    event = state.outbox[-1]
    assert isinstance(event, Trained) and (event.tickets, event.oldest, event.incarnation) == (ids[1:], [1, 0], A)
    again = state.trained(TrainedRequest(2, 2, ids[1:], incarnation=A, oldest=[1, 0]), 0.0)
    assert again == TrainedReply(0, 0) and state.outbox[-1] is event
    with pytest.raises(ValueError, match="oldest has 1 versions for 3"):
        state.trained(TrainedRequest(3, 3, ids, incarnation=A, oldest=[0]), 0.0)


def test_what_finished_and_never_arrived_is_reissued_once_and_its_quota_refunded_once() -> None:
    state = running()
    held, gone, late, busy = tickets(state, 4)
    for ticket in (held, gone):
        finish(state, ticket)
    state.finish(FinishRequest(late.ticket_id, 0, "w", "accepted", "", [ANSWER]), ARRIVAL_GRACE_S)
    request = TrainedRequest(0, 0, incarnation=A, held=[(held.ticket_id, 0)])
    assert state.refusal() == "staleness" and state.ledger.counted == 4
    reply = state.trained(request, ARRIVAL_GRACE_S + 1)
    assert isinstance(reply, TrainedReply) and reply.lost == [gone.ticket_id], "not what finished a moment ago, or runs"
    assert state.outbox[-1] == Reissued(gone.ticket_id, 0, "never arrived", ARRIVAL_GRACE_S + 1)
    assert state.ledger.counted == 3
    again = state.trained(request, ARRIVAL_GRACE_S + 1)
    assert isinstance(again, TrainedReply) and again.lost == [] and state.ledger.counted == 3
    [fresh] = tickets(state)
    assert (fresh.ticket_id, fresh.attempt) == (gone.ticket_id, 1) and state.refusal() == "staleness"
    state.finish(FinishRequest(gone.ticket_id, 1, "w", "accepted", "", [ANSWER]), 20.0)
    reply = state.trained(TrainedRequest(0, 0, incarnation=A, held=[(held.ticket_id, 0), (gone.ticket_id, 0)]), 1e6)
    assert isinstance(reply, TrainedReply)
    assert reply.lost == [late.ticket_id], "an attempt before it is there, so that this one is refused as a copy"
    assert state.ledger.is_running(busy.ticket_id, 0)


def test_a_step_that_is_told_again_shows_once() -> None:
    """Its first reply was lost."""
    state = running()
    for version in (1, 1, 2):
        trained(state, version, [], A, staleness={"0": version})
    assert [(step.version, step.histogram) for step in state.staleness] == [(1, {"0": 1}), (2, {"0": 2})]


def test_a_claim_ends_the_attempts_that_still_run_and_is_refused_to_an_older_training_side() -> None:
    state = running()
    early, late = tickets(state, 2)
    place(state, early)
    finish(state, late)
    ids = [early.ticket_id, late.ticket_id]
    assert state.claim(ClaimRequest(1, ids, A), 0.0) == ClaimReply([]) and len(state.reservations) == 0
    assert isinstance(schedule(state, early), NotRunning)
    assert state.outbox[-1] == Claimed(1, ids, 0.0, A)
    assert state.claim(ClaimRequest(1, ids, A), 0.0) == ClaimReply([]) and state.outbox[-2] != state.outbox[-1]
    with pytest.raises(ValueError, match="ticket 0000000009 was never granted"):
        state.claim(ClaimRequest(1, ["0000000009"], A), 0.0)
    with pytest.raises(ValueError, match=f"{B} has not called /roll_back"):
        state.claim(ClaimRequest(1, ids, B), 0.0)
    start(state, 0, B)
    assert isinstance(state.claim(ClaimRequest(1, ids, A), 0.0), OlderTraining)
    assert state.ledger.counts.open["waiting"] == 2


def test_what_the_ledger_does_not_know_is_not_passed_over() -> None:
    """It has lost its end, with the disk of the manager alone: the training side must go back to a checkpoint."""
    state = running()
    [ticket] = tickets(state)
    trained(state, 1, [ticket.ticket_id], A)
    for request in (
        TrainedRequest(2, 2, ["0000000009"], incarnation=A),
        TrainedRequest(2, 2, dropped=[("0000000009", "stale")], incarnation=A),
        TrainedRequest(2, 2, [ticket.ticket_id], incarnation=A),
    ):
        before = list(state.outbox)
        with pytest.raises(ValueError, match="never granted|trained at version 2, though it is trained@1"):
            state.trained(request, 0.0)
        assert state.outbox == before


@pytest.mark.parametrize(
    "body", [{"version": -1}, {"version": 1 << 31}, {"version": 1, "trained": ["0000000000"], "oldest": [1 << 31]}]
)
def test_numbers_that_no_ledger_can_hold_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"step": 1} | body), type=TrainedRequest)


def test_what_this_very_call_trains_or_drops_need_not_be_held() -> None:
    state = running()
    first, second = tickets(state, 2)
    for ticket in (first, second):
        finish(state, ticket)
    state.claim(ClaimRequest(1, [first.ticket_id], A), 0.0)
    request = TrainedRequest(
        1, 1, [first.ticket_id], [(second.ticket_id, "filtered")], incarnation=A, oldest=[0], held=[]
    )
    reply = state.trained(request, 1e6)
    assert reply == TrainedReply(1, 1, [])


def test_without_a_word_on_what_is_held_nothing_is_reissued() -> None:
    state = running()
    finish(state, tickets(state)[0])
    assert state.trained(TrainedRequest(0, 0, incarnation=A), 1e6) == TrainedReply(0, 0, [])


def test_a_restart_after_the_clock_was_set_back_does_not_put_off_when_a_ticket_is_missed() -> None:
    state = running()
    lost, gone = tickets(state, 2, now=1e6)
    state.finish(FinishRequest(gone.ticket_id, 0, "w", "accepted", "", [ANSWER]), 1e6)
    restarted = ManagerState(SETTINGS)
    restarted.restore_from(state.outbox)
    restarted.open(1e3)
    assert restarted.expire(1e3 + SETTINGS.lease_s) == []
    assert restarted.expire(1e3 + SETTINGS.lease_s + 1) == [lost.ticket_id]
    request = TrainedRequest(0, 0, incarnation=A, held=[])
    reply = restarted.trained(request, 1e3 + ARRIVAL_GRACE_S + 1)
    assert isinstance(reply, TrainedReply) and reply.lost == [gone.ticket_id]


def test_finished_tells_the_versions_of_the_answers() -> None:
    state = running()
    first, second = tickets(state, 2)
    answers = [type(ANSWER)(0.0, False, 3, "stop", low, high) for low, high in ((2, 3), (1, 2))]
    state.finish(FinishRequest(first.ticket_id, 0, "w", "accepted", "", answers), 0.0)
    state.finish(FinishRequest(second.ticket_id, 0, "w", "failed", "x"), 0.0)
    versions = [(e.version_min, e.version_max) for e in state.outbox[-2:]]  # type: ignore[union-attr]
    assert versions == [(1, 3), (-1, -1)]

"""ManagerState when the training side starts again, and what the master says: fenced, idempotent, nothing missed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from realsys.errors import LedgerError
from realsys.manager.ledger.events import Opened, RolledBack
from realsys.manager.messages import (
    AllocateRequest,
    EvaluateRequest,
    FinishRequest,
    RollBackReply,
    RollBackRequest,
    ScheduleRequest,
)
from realsys.manager.overview import status
from realsys.manager.refusals import NotRunning, OlderTraining
from realsys.manager.routing.servers import Idle
from realsys.manager.state import ManagerState
from tests.support.ledger.manager_states import (
    ANSWER,
    SETTINGS,
    address,
    finish,
    order,
    place,
    schedule,
    tickets,
    update,
)
from tests.support.training.training_sides import A, B, C, published, replayed, running, serve, start, trained


def test_roll_back_reissues_what_the_checkpoint_does_not_have_and_keeps_drops() -> None:
    """Trained at 1 and 2, running, finished, rejected, stale; back to 1: only the first of them is left trained."""
    state = running()
    first, second = tickets(state, 2)
    for ticket in (first, second):
        finish(state, ticket)
    trained(state, 1, [first.ticket_id], A)
    trained(state, 2, [second.ticket_id], A)
    serve(state, 2, A)
    runs, ends, bad, old = tickets(state, 4)
    finish(state, ends)
    finish(state, bad, "rejected")
    finish(state, old)
    trained(state, 3, [], A, dropped=[(old.ticket_id, "stale")])
    place(state, runs)
    assert start(state, 1, B) == 3
    states = state.ledger.counts.by_state()
    assert states == {"running": 0, "finished": 0, "waiting": 3, "claimed": 0, "trained": 1, "dropped": 2}
    assert state.ledger.counted == 1 and len(state.reservations) == 0
    assert (
        state.ledger.ended(first.ticket_id) == "trained@1" and state.ledger.ended(bad.ticket_id) == "dropped: rejected"
    )
    assert state.ledger.counts.reissued_by_cause == {"rolled back": 3}
    assert isinstance(schedule(state, runs), NotRunning)
    reply = state.finish(FinishRequest(ends.ticket_id, 0, "w", "accepted", "", [ANSWER]), 0.0)
    assert not reply.known, "a late finish of the attempt that was rolled back"


def test_roll_back_is_one_record_and_replays_to_the_same_state() -> None:
    state = running()
    for ticket in tickets(state, 4):
        finish(state, ticket)
    trained(state, 1, ["0000000000", "0000000001"], A)
    before = len(state.outbox)
    assert start(state, 0, B, now=5.0) == 4
    assert state.outbox[before:] == [RolledBack(0, 0, B, "/c/0", 5.0)]
    again = replayed(state)
    assert again.trainer_incarnation == B and again.ledger.counts == state.ledger.counts
    state.outbox.clear()
    again.outbox.clear()
    assert again.snapshot(9.0) == state.snapshot(9.0)


def test_nothing_is_granted_until_the_new_training_side_has_published_and_a_server_has_verified_it() -> None:
    """The old version 1 and the new one are different weights, whatever the server says it has."""
    state = running()
    serve(state, 1, A)
    trained(state, 1, [], A)
    [before] = tickets(state)
    finish(state, before)
    trained(state, 1, [before.ticket_id], A)
    assert start(state, 1, B) == 0
    assert state.version == -1 and state.refusal() == "no_server"
    assert isinstance(state.servers.next_order("generation_server/0", "1", 0.0), Idle)
    assert not state.publish(published(7, A)), "weights of a dead incarnation are never served again"
    assert state.publish(published(1, B)) and state.refusal() == "no_server"
    update(state, 0)
    [ticket] = tickets(state)
    assert ticket.trainer_incarnation == B and ticket.version == 1
    assert not state.publish(published(0, B)), "inside an incarnation versions never go back"


def test_capacity_is_right_from_the_first_grant_after_a_roll_back() -> None:
    """B = 2, eta = 1. At version 1 with two trained N starts at 2, and the bound is 2 * (1 + 1 + 1) = 6: four."""
    state = running()
    granted = tickets(state, 4)
    for ticket in granted:
        finish(state, ticket)
    trained(state, 1, [ticket.ticket_id for ticket in granted[:2]], A)
    serve(state, 1, A)
    trained(state, 2, [ticket.ticket_id for ticket in granted[2:]], A)
    start(state, 1, B)
    serve(state, 1, B)
    again = tickets(state, 100)
    assert [(t.ticket_id, t.attempt) for t in again[:2]] == [(t.ticket_id, 1) for t in granted[2:]], "re-issued first"
    assert len(again) == 4 and state.ledger.counted == 6 and state.refusal() == "staleness"


def test_an_update_that_began_before_the_roll_back_proves_nothing() -> None:
    state = running()
    assert state.publish(published(1, A))
    success, failure = order(state, 0), order(state, 0)
    state.begin_update(success, 0.0)
    trained(state, 1, [], A)
    start(state, 0, B)
    assert state.publish(published(0, B))
    assert state.servers.succeeded(success, 0.1, {}) and state.refusal() == "no_server"
    assert state.servers.failed(failure, "pruned", 0.0)
    server = state.servers.get("generation_server/0")
    assert server is not None and not server.quarantined, "it failed to load what nobody wants any more"
    update(state, 0)
    assert state.refusal() is None


def test_a_drain_for_a_version_that_will_not_come_ends() -> None:
    state = running()
    state.settings = dataclasses.replace(SETTINGS, interruptible=False)
    [ticket] = tickets(state)
    place(state, ticket)
    assert state.publish(published(1, A))
    assert not state.begin_update(order(state, 0), 0.0)
    start(state, 0, B)
    serve(state, 0, B)
    assert state.refusal() is None


def test_the_same_incarnation_again_changes_nothing_and_an_older_one_is_refused() -> None:
    state = running()
    finish(state, tickets(state)[0])
    assert start(state, 0, C) == 1
    records = len(state.outbox)
    assert start(state, 0, C) == 1 and len(state.outbox) == records, "the answer to a repeated call is the same"
    for older in (A, B):
        refused = state.roll_back(RollBackRequest(0, 0, older), 0.0)
        assert isinstance(refused, OlderTraining) and older in refused.problem and C in refused.problem
    with pytest.raises(ValueError, match="has rolled back to 0, not to -1"):
        state.roll_back(RollBackRequest(-1, -1, C), 0.0)
    assert len(state.outbox) == records


def test_a_checkpoint_that_the_ledger_knows_nothing_of_is_refused() -> None:
    state = running()
    with pytest.raises(ValueError, match="version 5: the ledger ends at 0: it is older than the checkpoint /c/5"):
        start(state, 5, B)
    assert state.trainer_incarnation == A


def test_the_first_start_is_remembered_by_a_manager_that_restarts_before_any_ticket() -> None:
    state = running()
    again = replayed(state)
    assert again.trainer_incarnation == A and again.ledger.counts.starts == 1
    again.observe_servers([address(0)])
    assert not again.publish(published(4, "0")), "what an earlier run left in the name store"
    serve(again, 0, A)
    assert tickets(again)[0].trainer_incarnation == A


def test_evaluations_of_undone_versions_and_unfinished_ones_are_forgotten_and_may_be_asked_again() -> None:
    state = running()
    state.evaluate(EvaluateRequest("done", "eval", 1, incarnation=A), 0.0)
    [ticket] = tickets(state)
    finish(state, ticket)
    state.evaluate(EvaluateRequest("open", "eval", 2, incarnation=A), 0.0)
    old, _, group = tickets(state, 3)
    finish(state, group)
    trained(state, 1, [group.ticket_id], A)
    serve(state, 1, A)
    state.evaluate(EvaluateRequest("late", "eval", 1, incarnation=A), 0.0)
    finish(state, tickets(state)[0])
    assert start(state, 0, B) == 1
    assert set(state.evaluations.all()) == {"done"} == set(replayed(state).evaluations.all())
    serve(state, 0, B)
    state.evaluate(EvaluateRequest("open", "eval", 2, incarnation=B), 0.0)
    [again] = tickets(state)
    assert again.ticket_id == old.ticket_id and again.attempt > old.attempt
    assert not state.finish(FinishRequest(old.ticket_id, old.attempt, "w", "accepted", "", [ANSWER]), 0.0).known


def test_the_reply_to_a_roll_back_names_every_evaluation_that_was_ever_asked_for() -> None:
    """The training side knows which of them it has a result of. The same call again, and a restart, change nothing."""
    state = running()
    for name in ("one", "two"):
        state.evaluate(EvaluateRequest(name, "eval", 1, incarnation=A), 0.0)
    finish(state, tickets(state)[0])
    request = RollBackRequest(0, 0, B)
    for asked in (state, state, replayed(state)):
        reply = asked.roll_back(request, 0.0)
        assert isinstance(reply, RollBackReply) and reply.evaluations == ["one", "two"]
    assert set(state.evaluations.all()) == {"one"}


def test_an_older_training_side_starts_no_evaluation_of_weights_that_are_gone() -> None:
    state = running()
    start(state, 0, B)
    before = len(state.outbox)
    refused = state.evaluate(EvaluateRequest("late", "eval", 1, incarnation=A), 0.0)
    assert isinstance(refused, OlderTraining) and A in refused.problem
    with pytest.raises(ValueError, match="has not called /roll_back"):
        state.evaluate(EvaluateRequest("early", "eval", 1, incarnation=C), 0.0)
    assert len(state.outbox) == before and not state.evaluations.asked()


def test_what_decisions_are_bound_by_is_recorded_when_it_is_new_or_changed() -> None:
    state = ManagerState(SETTINGS)
    state.open(1.0)
    assert state.outbox == [Opened(10, 1, 2, 1, "drop", 4, 1.0)]
    again = replayed(state)
    again.open(2.0)
    assert again.outbox == []
    changed = ManagerState(dataclasses.replace(SETTINGS, eta=3))
    changed.restore_from(state.outbox)
    changed.open(2.0)
    assert [event.eta for event in changed.outbox if isinstance(event, Opened)] == [3]


def test_tickets_of_another_order_of_prompts_are_refused() -> None:
    state = running()
    tickets(state)
    for other_settings in (
        dataclasses.replace(SETTINGS, seed=2),
        dataclasses.replace(SETTINGS, batch_groups=3),
        dataclasses.replace(SETTINGS, split_sizes={"train": 11}),
    ):
        other = ManagerState(other_settings)
        other.restore_from(state.outbox)
        with pytest.raises(LedgerError, match="its tickets were granted with"):
            other.open(0.0)


def test_a_repeated_allocation_after_a_roll_back_gets_nothing_of_before() -> None:
    state = running()
    request = AllocateRequest("w", 2, request_id="one")
    before = state.allocate(request, 0.0).tickets
    start(state, 0, B)
    serve(state, 0, B)
    after = state.allocate(request, 0.0).tickets
    assert [(t.ticket_id, t.attempt) for t in after] == [(t.ticket_id, 1) for t in before]
    assert isinstance(state.schedule(ScheduleRequest(before[0].ticket_id, 0, 1, 1), 0.0), NotRunning)


def test_status_shows_the_training_side() -> None:
    state = running()
    start(state, 0, B)
    shown = status(state, 1.0, 0.0)
    assert (shown["ledger"]["trainer_incarnation"], shown["ledger"]["starts"]) == (B, 2)
    json.dumps(shown, allow_nan=False)

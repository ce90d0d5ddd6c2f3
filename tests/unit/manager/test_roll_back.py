"""Roll-backs of ManagerState: journal records, servers, settings. Further: scenarios/roll_back.txt."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from realsys.errors import LedgerError
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import Opened, RolledBack
from realsys.manager.messages import EvaluateRequest, FinishRequest
from realsys.manager.operations import status
from tests.support.ledger.manager_states import (
    ANSWER,
    SETTINGS,
    address,
    finish,
    order,
    place,
    tickets,
    update,
)
from tests.support.training.training_sides import A, B, published, replayed, running, serve, start, trained


def test_roll_back_is_one_record() -> None:
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


def test_evaluation_of_undone_version_is_discarded() -> None:
    """It was requested at version 0, and no server had that version any more."""
    state = running()
    granted = tickets(state, 2)
    for ticket in granted:
        finish(state, ticket)
    trained(state, 1, [ticket.ticket_id for ticket in granted], A)
    state.evaluate(EvaluateRequest("step-0", "eval", 1, incarnation=A), 0.0)
    state.observe_servers([])
    state.servers.publish(published(1, A))
    state.observe_servers([address(0)])
    update(state, 0)
    [problem] = tickets(state, 1)
    assert (problem.kind, problem.version) == ("eval", 1)
    answer = msgspec.structs.replace(ANSWER, version_min=1, version_max=1)
    state.finish(FinishRequest(problem.ticket_id, problem.attempt, "w", "accepted", "", [answer]), 0.0)
    assert state.evaluations.find("step-0").is_finished
    start(state, 0, B)
    assert not state.evaluations.by_id


def test_update_from_before_roll_back_verifies_nothing() -> None:
    state = running()
    assert state.servers.publish(published(1, A))
    success, failure = order(state, 0), order(state, 0)
    state.begin_update(success, 0.0)
    trained(state, 1, [], A)
    start(state, 0, B)
    assert state.servers.publish(published(0, B))
    assert state.servers.succeeded(success, 0.1, {}) and state.refusal() == "no_server"
    assert state.servers.failed(failure, "pruned", 0.0)
    server = state.servers.get("generation_server/0")
    assert server is not None and not server.quarantined, "it failed to load what nobody wants any more"
    update(state, 0)
    assert state.refusal() is None


def test_roll_back_ends_a_drain() -> None:
    state = running()
    state.settings = dataclasses.replace(SETTINGS, interruptible=False)
    [ticket] = tickets(state)
    place(state, ticket)
    assert state.servers.publish(published(1, A))
    assert not state.begin_update(order(state, 0), 0.0)
    start(state, 0, B)
    serve(state, 0, B)
    assert state.refusal() is None


def test_settings_are_recorded_when_changed() -> None:
    state = ManagerState(SETTINGS)
    state.open(1.0)
    assert state.outbox == [Opened(10, 1, 2, 1, "drop", 4, 1.0, 2)]
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


def test_status_shows_the_training_side() -> None:
    state = running()
    start(state, 0, B)
    shown = status(state, 1.0, 0.0)
    assert (shown["ledger"]["trainer_incarnation"], shown["ledger"]["starts"]) == (B, 2)
    json.dumps(shown, allow_nan=False)

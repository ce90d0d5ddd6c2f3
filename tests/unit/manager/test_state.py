"""ManagerState: admission, tickets, evaluations, rates, status."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from realsys.config.schema import Config
from realsys.manager.ledger.events import Resumed
from realsys.manager.messages import (
    AllocateRequest,
    EvaluateRequest,
    FinishRequest,
    TrainedRequest,
)
from realsys.manager.overview import explain, status
from realsys.manager.routing.rates import RateWindow
from realsys.manager.settings import ManagerSettings
from realsys.manager.state import ManagerState
from tests.support.ledger.manager_states import (
    ANSWER,
    SETTINGS,
    address,
    finish,
    place,
    ready,
    tickets,
    update,
    version,
)


def test_no_ticket_before_a_server_has_verified_a_version() -> None:
    state = ManagerState(SETTINGS)
    assert state.refusal() == "no_server" and "none registered" in explain(state)
    state.observe_servers([address(0)])
    state.publish(version(0))
    assert state.refusal() == "no_server" and "generation_server/0 registered at no version" in explain(state)
    update(state, 0)
    assert state.refusal() is None


def test_published_version_counts_at_once_and_servers_inside_the_bound_go_on() -> None:
    state = ready()
    assert len(tickets(state, 100)) == 4
    assert state.refusal() == "staleness"
    state.publish(version(1))
    assert len(tickets(state, 100)) == 2, "the server still serves version 0, one behind"
    state.publish(version(2))
    assert state.refusal() == "no_server", "two behind is beyond the bound"


def test_synchronous_mode_waits_for_the_servers() -> None:
    state = ready(eta=0)
    assert len(tickets(state, 100)) == 2
    state.publish(version(1))
    assert state.refusal() == "no_server"
    update(state, 0)
    assert len(tickets(state, 100)) == 2


def test_no_more_groups_than_the_steps_can_use() -> None:
    state = ready(total_steps=1)
    assert len(tickets(state, 100)) == 2
    assert state.refusal() == "exhausted"


def test_paused_when_the_master_is_done() -> None:
    state = ready()
    state.master = {"phase": "done"}
    assert state.refusal() == "paused"


def test_stale_drop_requeues_the_prompt_and_other_drops_do_not() -> None:
    state = ready()
    first, second = tickets(state, 2)
    for ticket in (first, second):
        finish(state, ticket)
    state.trained(TrainedRequest(1, 1, dropped=[(first.ticket_id, "stale"), (second.ticket_id, "filtered: 1.0")]), 0.0)
    again = tickets(state)[0]
    assert again.prompt_index == first.prompt_index and again.ticket_id != first.ticket_id
    assert tickets(state)[0].prompt_index not in (first.prompt_index, second.prompt_index)
    assert state.ledger.counts.dropped_by_reason == {"stale": 1, "filtered": 1}


def test_worker_seen_late_is_bound_to_its_first_incarnation() -> None:
    state = ready()
    [ticket] = tickets(state)
    beat = {"w": json.dumps({"kind": "rollout_worker", "incarnation": "5"})}
    assert state.observe_workers({}, 0.0) == []
    assert state.observe_workers(beat, 0.0) == []
    assert state.observe_workers(beat, 0.0) == []
    assert state.observe_workers({"w": beat["w"].replace("5", "6")}, 0.0) == [ticket.ticket_id]


def test_lapsed_lease_releases_the_reservation_and_reissues() -> None:
    state = ready(lease_s=10.0)
    state.evaluate(EvaluateRequest("e", "eval", 1), 0.0)
    granted = tickets(state, 3)
    for ticket in granted:
        place(state, ticket)
    assert state.expire(10.0) == []
    assert sorted(state.expire(10.1)) == sorted(ticket.ticket_id for ticket in granted)
    assert len(state.reservations) == 0 and state.reservations.load("generation_server/0") == (0, 0)
    assert [(ticket.kind, ticket.attempt) for ticket in tickets(state, 3)] == [("eval", 1), ("train", 1), ("train", 1)]


def test_repeated_allocation_gets_its_tickets_once_more_and_no_new_ones() -> None:
    state = ready()
    request = AllocateRequest("w", 2, request_id="one")
    first = state.allocate(request, 0.0).tickets
    assert state.allocate(request, 0.0).tickets == first and state.ledger.counted == 2
    assert state.allocate(AllocateRequest("other", 1, request_id="one"), 0.0).tickets[0] not in first
    state.expire(1e6)
    fresh = state.allocate(request, 0.0).tickets
    assert [(ticket.ticket_id, ticket.attempt) for ticket in fresh] == [(ticket.ticket_id, 1) for ticket in first]


def test_evaluation_needs_its_version_and_takes_newer_ones() -> None:
    state = ready()
    state.publish(version(1))
    state.evaluate(EvaluateRequest("e", "eval", 99, seed=3), 0.0)
    assert {ticket.kind for ticket in tickets(state, 2)} == {"train"}
    update(state, 0)
    granted = tickets(state, 3)
    assert [ticket.ticket_id for ticket in granted] == [f"eval-e-{index:06d}" for index in range(3)]
    state.publish(version(2))
    assert place(state, granted[0]).version == 1
    finish(state, granted[0])
    evaluation = state.evaluations.get("e")
    assert evaluation is not None
    assert msgspec.to_builtins(evaluation.reply()) == {
        "done": 1, "total": 3, "failed": 0, "accuracy": 1.0, "reward_mean": 5.0, "length_mean": 30.0, "version_min": 0,
        "version_max": 0, "metrics": {},
    }  # fmt: skip


def test_evaluation_means_each_metric_over_its_answers() -> None:
    state = ready()
    state.evaluate(EvaluateRequest("e", "eval", 3), 0.0)
    results: list[tuple[bool | None, dict[str, float]]] = [(True, {"turns": 1.0}), (None, {"turns": 2.0, "x": 5.0})]
    for ticket, (correct, metrics) in zip(tickets(state, 2), results, strict=True):
        answer = msgspec.structs.replace(ANSWER, correct=correct, metrics=metrics)
        state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [answer]), 0.0)
    restored = ready()
    restored.restore_from(list(state.outbox))
    compacted = ready()
    state.outbox = []
    compacted.restore_from([state.snapshot(0.0)])
    for each in (state, restored, compacted):
        evaluation = each.evaluations.get("e")
        assert evaluation is not None
        reply = evaluation.reply()
        assert (reply.done, reply.accuracy, reply.metrics) == (2, 1.0, {"turns": 1.5, "x": 5.0})


def test_evaluation_without_right_or_wrong_has_no_accuracy() -> None:
    """An absent number is not 0 %."""
    state = ready()
    state.evaluate(EvaluateRequest("e", "eval", 1), 0.0)
    (ticket,) = tickets(state, 1)
    answer = msgspec.structs.replace(ANSWER, correct=None)
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [answer]), 0.0)
    evaluation = state.evaluations.get("e")
    assert evaluation is not None and evaluation.reply().done == 1
    assert evaluation.reply().accuracy is None


def test_call_goes_back_to_the_server_of_the_call_before() -> None:
    state = ready(servers=3)
    first, second = tickets(state, 2)
    held = place(state, first, call="0.0")
    place(state, second, call="0.0")
    ended = (first.ticket_id, first.attempt, "0.0")
    again = place(state, first, call="0.1", previous=(held.server, held.version), released=[ended])
    assert again.server == held.server and state.reservations.calls(first.ticket_id) == ["0.1"]
    other = place(state, first, call="1.1", previous=(held.server, held.version + 1))
    assert other.server != held.server, "its cache is of other weights"


def test_release_of_an_older_attempt_changes_nothing() -> None:
    state = ready()
    [ticket] = tickets(state)
    finish(state, ticket, "failed")
    [again] = tickets(state)
    place(state, again, call="0.0")
    place(state, again, call="1.0", released=[(ticket.ticket_id, ticket.attempt, "0.0")])
    assert (again.attempt, state.reservations.calls(again.ticket_id)) == (1, ["0.0", "1.0"])


def test_tokens_are_counted_for_the_servers_that_sampled_them() -> None:
    state = ready(servers=2)
    [ticket] = tickets(state)
    servers = {"generation_server/0": 10, "generation_server/1": 20, "gone": 5}
    request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [ANSWER], servers)
    state.finish(request, 0.0)
    assert [row["tokens_per_s"] for row in status(state, 1.0, 0.0)["servers"]] == pytest.approx([10.0, 20.0])


def test_answers_are_counted_once_and_by_server() -> None:
    state = ready()
    [ticket] = tickets(state)
    place(state, ticket)
    finish(state, ticket, answers=4)
    finish(state, ticket, answers=4)
    shown = status(state, 1.0, 0.0)
    assert shown["throughput"]["generated_tokens"] == 120 and shown["throughput"]["answers"] == {"stop": 4}
    assert shown["servers"][0]["tokens_per_s"] == pytest.approx(120.0)
    json.dumps(shown, allow_nan=False)


def test_rate_window_forgets_and_does_not_overstate_a_short_history() -> None:
    window = RateWindow(window_s=10)
    assert window.rate(0.0) == 0.0
    window.add(50, 100.0)
    assert window.rate(100.1) == 50.0, "a burst in the first instant is not a million per second"
    window.add(50, 104.0)
    assert window.rate(105.0) == 20.0
    assert window.rate(200.0) == 0.0 and window.total == 100


def test_settings_come_from_the_configuration() -> None:
    config = Config()
    made = ManagerSettings.of(config, {"train": 5})
    assert (made.batch_groups, made.eta, made.group_size) == (512, 4, 16)
    assert made.routing == "sticky" and made.interruptible and made.total_steps == config.train.total_steps


def test_a_resumed_manager_admits_by_the_same_bound_from_the_first_grant() -> None:
    """B = 2, eta = 1, step 5: N starts at 10 and 2 * (5 + 1 + 1) = 14 is the bound, so four groups and no more."""
    event = Resumed("/c", 5, 10, 12, [3, 1], 0.0)
    state = ManagerState(dataclasses.replace(SETTINGS, total_steps=7))
    state.restore_from([event])
    state.observe_servers([address(0)])
    assert state.refusal() == "no_server", "nothing is granted before the first version"
    state.publish(version(5))
    update(state, 0)
    tickets = state.allocate(AllocateRequest("w", 100), 0.0).tickets
    assert len(tickets) == 4 and [ticket.prompt_index for ticket in tickets[:2]] == [3, 1]
    assert state.refusal() == "exhausted", "7 steps of 2 groups are 14"
    again = ManagerState(state.settings)
    again.restore_from([event, *state.outbox])  # a manager that was restarted
    assert again.ledger.counted == 14 and again.ledger.position() == state.ledger.position()


def test_a_resumed_manager_waits_for_the_next_version_at_the_bound() -> None:
    state = ManagerState(SETTINGS)
    state.restore_from([Resumed("/c", 5, 10, 12, [], 0.0)])
    state.observe_servers([address(0)])
    state.publish(version(5))
    update(state, 0)
    tickets = state.allocate(AllocateRequest("w", 100), 0.0).tickets
    assert len(tickets) == 4 and state.refusal() == "staleness"
    state.publish(version(6))
    assert len(state.allocate(AllocateRequest("w", 100), 1.0).tickets) == 2


def test_tickets_of_a_resumed_trial_draw_other_numbers_than_the_first_ones_did() -> None:
    def first_seed(*events: Resumed) -> int:
        state = ready()
        state.restore_from(events)
        state.publish(version(5))
        update(state, 0)
        return state.allocate(AllocateRequest("w", 1), 0.0).tickets[0].seed

    assert first_seed() != first_seed(Resumed("/c", 5, 10, 12, [], 0.0))

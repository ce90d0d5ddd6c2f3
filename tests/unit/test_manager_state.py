"""ManagerState: servers, weight roll-out, routing of tickets, evaluations, rates, status."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from realsys.admission.events import Resumed
from realsys.admission.manager import ManagerSettings, ManagerState, NoServer, NotRunning
from realsys.admission.messages import (
    AllocateRequest,
    Answer,
    EvaluateRequest,
    FinishRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedRequest,
)
from realsys.admission.rates import RateWindow
from realsys.admission.servers import Idle, Pace, UpdateOrder
from realsys.admission.status import explain, status
from realsys.config.schema import Config
from realsys.types import PublishedVersion, ServerAddress, Ticket

SETTINGS = ManagerSettings(2, 1, 4, 2, 1, {"train": 10, "eval": 3})
ANSWER = Answer(5.0, True, 30, "stop", 0, 0)


def version(number: int) -> PublishedVersion:
    return PublishedVersion(number, "m", f"/v{number}", number)


def address(index: int, incarnation: str = "1") -> ServerAddress:
    return ServerAddress(f"generation_server/{index}", f"http://h:{index}", 1, "h", incarnation)


def order(state: ManagerState, index: int, now: float = 0.0, incarnation: str = "1") -> UpdateOrder:
    made = state.servers.next_order(f"generation_server/{index}", incarnation, now)
    assert isinstance(made, UpdateOrder)
    return made


def update(state: ManagerState, index: int, now: float = 0.0) -> None:
    made = order(state, index, now)
    assert state.begin_update(made, 0.0)
    assert state.servers.succeeded(made, 0.1, {"pause_s": 0.002})


def ready(servers: int = 1, **changes: Any) -> ManagerState:
    state = ManagerState(dataclasses.replace(SETTINGS, **changes))
    state.observe_servers([address(index) for index in range(servers)])
    state.publish(version(0))
    for index in range(servers):
        update(state, index)
    return state


def tickets(state: ManagerState, count: int = 1, now: float = 0.0) -> list[Ticket]:
    return state.allocate(AllocateRequest("w", count), now).tickets


def schedule(state: ManagerState, ticket: Ticket, **more: Any) -> ScheduleReply | NoServer | NotRunning:
    return state.schedule(ScheduleRequest(ticket.ticket_id, ticket.attempt, 10, 20, ticket.n, **more), 0.0)


def place(state: ManagerState, ticket: Ticket, **more: Any) -> ScheduleReply:
    reply = schedule(state, ticket, **more)
    assert isinstance(reply, ScheduleReply)
    return reply


def finish(state: ManagerState, ticket: Ticket, outcome: Any = "accepted", answers: int = 1) -> None:
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, "", [ANSWER] * answers), 0.0)


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


def test_update_of_an_old_version_does_not_end_a_quarantine() -> None:
    state = ready()
    state.publish(version(1))
    old = order(state, 0)
    state.begin_update(old, 0.0)
    state.servers.report_failure("generation_server/0", 0, "connection reset", 0.0)
    state.publish(version(2))
    state.servers.succeeded(old, 0.1, {})
    server = state.servers.get("generation_server/0")
    assert server is not None and server.quarantined and state.refusal() == "no_server"
    update(state, 0)
    assert not server.quarantined and server.epoch == 1 and state.refusal() is None


def test_failed_update_backs_off_longer_each_time_and_takes_the_newest_version_next() -> None:
    state = ready()
    state.publish(version(1))
    waits = []
    now = 0.0
    for _ in range(3):
        state.servers.failed(order(state, 0, now), "checksum", now)
        idle = state.servers.next_order("generation_server/0", "1", now)
        assert isinstance(idle, Idle) and idle.until is not None
        waits.append(idle.until - now)
        now = idle.until
    assert waits == [0.5, 1.0, 2.0]
    late = order(state, 0, now)
    state.publish(version(2))
    state.servers.failed(late, "pruned", now)
    assert order(state, 0, now).target.version == 2


def test_reported_failure_from_before_the_last_proof_is_old_news() -> None:
    state = ready(servers=2)
    first, second = tickets(state, 2)
    held = place(state, first)
    state.servers.get(held.server)
    for ticket in (first, second):
        state.reservations.release(ticket.ticket_id)
    states = [place(state, first), place(state, second)]
    failed = states[0].server
    moved = place(state, first, failed_server=failed, failure="reset")
    assert moved.server != failed
    update(state, int(failed[-1]))
    place(state, second, failed_server=states[1].server, failure="reset, noticed late")
    server = state.servers.get(failed)
    assert server is not None and not server.quarantined


def test_failure_blamed_on_a_server_the_ticket_is_not_on_is_ignored() -> None:
    state = ready()
    [ticket] = tickets(state)
    place(state, ticket, failed_server="generation_server/0", failure="never was there")
    assert state.refusal() is None


def test_route_releases_reservation_when_the_server_dies() -> None:
    state = ready(servers=2)
    [ticket] = tickets(state)
    held = place(state, ticket)
    survivors = [address(index) for index in range(2) if address(index).name != held.server]
    state.observe_servers(survivors)
    assert len(state.reservations) == 0 and state.reservations.load(held.server) == (0, 0)
    assert place(state, ticket).server == survivors[0].name
    finish(state, ticket)
    assert len(state.reservations) == 0


def test_restarted_server_starts_from_nothing_and_late_news_of_the_old_one_is_ignored() -> None:
    state = ready()
    state.publish(version(1))
    late = order(state, 0)
    state.observe_servers([address(0, "2")])
    assert not state.servers.succeeded(late, 0.1, {}) and not state.servers.failed(late, "reset", 0.0)
    assert state.servers.next_order("generation_server/0", "1", 0.0) is None
    fresh = order(state, 0, incarnation="2")
    assert fresh.probe and state.refusal() == "no_server"


def test_drain_waits_for_running_answers_when_they_must_not_be_interrupted() -> None:
    state = ready(interruptible=False)
    first, second = tickets(state, 2)
    place(state, first)
    state.publish(version(1))
    made = order(state, 0)
    assert not state.begin_update(made, 0.0)
    assert isinstance(schedule(state, second), NoServer), "nothing new while it drains"
    assert place(state, first).server == "generation_server/0", "who is there may finish there"
    finish(state, first)
    assert state.begin_update(made, 0.0)
    state.servers.succeeded(made, 0.1, {})
    assert place(state, second).version == 1


def test_versions_never_go_back_except_by_a_roll_back() -> None:
    state = ready()
    state.publish(version(1))
    update(state, 0)
    assert not state.publish(version(1)) and not state.publish(version(0)) and state.version == 1
    granted = tickets(state, 3)
    for ticket in granted[:2]:
        finish(state, ticket)
    state.trained(TrainedRequest(1, 1, [granted[0].ticket_id]), 0.0)
    state.roll_back(version(0), 1.0)
    assert state.version == 0 and state.refusal() == "no_server", "weights of version 1 are not served again"
    assert state.ledger.counts.by_state() == {"running": 1, "finished": 0, "waiting": 2, "trained": 0, "dropped": 0}


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
        "done": 1, "total": 3, "failed": 0, "accuracy": 1.0, "length_mean": 30.0, "version_min": 0, "version_max": 0
    }  # fmt: skip


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


# -- roll-out ----------------------------------------------------------------------------------------------------------


def begin(state: ManagerState, index: int, now: float) -> UpdateOrder | Idle | None:
    """The order of a server that may update now, begun; else what it waits for."""
    made = state.servers.next_order(f"generation_server/{index}", "1", now)
    if isinstance(made, UpdateOrder):
        assert state.begin_update(made, now)
    return made


def done(state: ManagerState, made: object, seconds: float = 0.1, **timings: float) -> None:
    assert isinstance(made, UpdateOrder) and state.servers.succeeded(made, seconds, timings)


def test_rolling_updates_a_fraction_at_a_time_oldest_weights_first() -> None:
    state = ready(4, pace=Pace(0.5, 30.0), eta=3)
    state.publish(version(1))
    first, second = begin(state, 0, 0.0), begin(state, 1, 1.0)
    assert isinstance(first, UpdateOrder) and isinstance(second, UpdateOrder)
    assert begin(state, 2, 2.0) == Idle(30.0) and begin(state, 3, 2.0) == Idle(30.0)
    done(state, first)
    state.publish(version(2))
    assert isinstance(begin(state, 0, 3.0), Idle), "0 has version 1 already: 2 and 3 are further behind"
    assert isinstance(begin(state, 2, 3.0), UpdateOrder)


def test_rolling_is_held_up_by_a_hanging_server_once_and_not_by_dead_ones() -> None:
    state = ready(3, pace=Pace(0.1, 30.0), eta=3)
    state.publish(version(1))
    assert isinstance(begin(state, 0, 0.0), UpdateOrder), "at least one at a time; this one hangs"
    assert begin(state, 1, 29.0) == Idle(30.0)
    assert isinstance(begin(state, 1, 30.0), UpdateOrder)
    state.observe_servers([address(0), address(2)])  # 1 dies
    assert isinstance(begin(state, 2, 31.0), UpdateOrder)
    hanging = state.servers.get("generation_server/0")
    assert hanging is not None and hanging.state == "updating" and state.refusal() is None


def test_rolling_gives_no_slot_to_servers_that_serve_nobody() -> None:
    state = ready(4, pace=Pace(0.25, 30.0), eta=1)
    state.publish(version(1))
    assert isinstance(begin(state, 0, 0.0), UpdateOrder)
    state.servers.report_failure("generation_server/1", 0, "connection reset", 0.0)
    state.observe_servers([address(index) for index in range(5)])  # 4 is new
    assert isinstance(begin(state, 1, 0.0), UpdateOrder) and isinstance(begin(state, 4, 0.0), UpdateOrder)
    assert isinstance(begin(state, 2, 0.0), Idle)
    state.publish(version(2))  # now all that have not updated are beyond the bound
    assert isinstance(begin(state, 2, 0.0), UpdateOrder) and isinstance(begin(state, 3, 0.0), UpdateOrder)


def test_after_a_restart_a_drain_waits_for_answers_whose_server_is_not_known() -> None:
    state = ready(interruptible=False)
    [ticket] = tickets(state)
    place(state, ticket)
    restarted = ManagerState(dataclasses.replace(SETTINGS, interruptible=False))
    restarted.restore_from(state.outbox)
    restarted.observe_servers([address(0)])
    restarted.publish(version(0))
    assert not restarted.begin_update(order(restarted, 0), 0.0)
    finish(restarted, ticket)
    assert restarted.begin_update(order(restarted, 0), 0.0)


def test_updates_are_kept_by_stage_for_the_page_and_the_metrics() -> None:
    state = ready(2)
    state.publish(version(1))
    made, other = begin(state, 0, 5.0), begin(state, 1, 6.0)
    done(state, made, 2.0, stage_s=1.5, verify_s=0.2, pause_s=0.01, load_s=0.004, first_token_s=0.02, fuse_s=1.0)
    assert isinstance(other, UpdateOrder) and state.servers.failed(other, "checksum", 8.0)
    shown = status(state, 9.0, 0.0)["rollout"]
    assert (shown["mode"], shown["at_newest"], shown["servers"], shown["failures"]) == ("all_at_once", 1, 2, 1)
    failed, good = shown["updates"][:2]
    assert (failed["server"], failed["error"], failed["pause_s"]) == ("generation_server/1", "checksum", None)
    assert good == {
        "server": "generation_server/0", "version": 1, "began": 5.0, "error": "", "stage_s": 1.5, "verify_s": 0.2,
        "pause_s": 0.01, "load_s": 0.004, "first_token_s": 0.02, "total_s": 2.0,
    }  # fmt: skip
    pauses = state.servers.updates.histograms["pause_s"]
    # the two first loads paused 2 ms each, this one 10 ms, which is on the edge of its bucket
    assert dict(pauses.cumulative()) == {
        "0.001": 0, "0.003": 2, "0.01": 3, "0.03": 3, "0.1": 3, "0.3": 3, "1": 3, "3": 3, "10": 3, "30": 3, "100": 3,
        "300": 3, "+Inf": 3,
    }  # fmt: skip
    assert pauses.total == pytest.approx(0.014)


def test_a_server_that_had_the_version_already_counts_as_no_update() -> None:
    state = ManagerState(SETTINGS)
    state.observe_servers([address(0)])
    state.publish(version(0))
    made = order(state, 0)
    assert made.probe and state.begin_update(made, 0.0) and state.servers.succeeded(made, 0.1, None)
    assert state.refusal() is None
    assert not state.servers.updates.recent and status(state, 1.0, 0.0)["servers"][0]["updates"] == 0

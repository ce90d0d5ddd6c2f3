"""ManagerState: servers, quarantine, drains, roll-out of weights."""

import dataclasses

import pytest

from realsys.manager.decisions import ManagerState
from realsys.manager.messages import AllocateRequest, NoServer, ScheduleRequest
from realsys.manager.operations import status
from realsys.manager.routing.servers import Idle, Pace, Probe, UpdateOrder
from tests.support.ledger.manager_states import (
    SETTINGS,
    address,
    answer,
    finish,
    order,
    place,
    ready,
    tickets,
    update,
    version,
)


def test_superseded_update_leaves_the_server_routable():
    """It is no failure of the server: the next update takes the newest version without a delay."""
    state = ready(eta=2)
    state.servers.publish(version(1))
    old = order(state, 0)
    state.begin_update(old, 0.0)
    state.servers.publish(version(2))
    state.servers.failed(old, "pruned", 0.0)
    assert state.refusal() is None and order(state, 0).target.version == 2
    state.servers.publish(version(3))
    assert state.refusal() == "no_server", "now it is beyond the bound"


def test_failed_update_backs_off_and_takes_newest_version():
    state = ready()
    state.servers.publish(version(1))
    waits = []
    now = 0.0
    for _ in range(3):
        state.servers.failed(order(state, 0, now), "checksum", now)
        assert state.refusal() is None, "it has version 0, which is within the bound"
        idle = state.servers.next_order("generation_server/0", "1", now)
        assert isinstance(idle, Idle) and idle.until is not None
        waits.append(idle.until - now)
        now = idle.until
    assert waits == [0.5, 1.0, 2.0]
    late = order(state, 0, now)
    state.servers.publish(version(2))
    state.servers.failed(late, "pruned", now)
    assert order(state, 0, now).target.version == 2


def test_report_before_last_proof_is_ignored():
    state = ready(servers=2)
    first, second = tickets(state, 2)
    states = [place(state, first), place(state, second)]
    failed = states[0].server
    state.servers.report(failed, 0, "a", "reset", 0.0)
    state.servers.report(failed, 0, "b", "reset", 0.0)
    server = state.servers.get(failed)
    assert server is not None and server.quarantined
    answer(state, int(failed[-1]), 0, 1.0)
    state.servers.report(failed, 0, "c", "reset, noticed late", 1.0)
    assert server.health.state == "healthy"


def test_failure_report_about_another_server_is_ignored():
    state = ready()
    [ticket] = tickets(state)
    place(state, ticket, failed_server="generation_server/0", failure="never was there")
    assert not state.servers.reports


def test_route_releases_reservation_when_the_server_dies():
    state = ready(servers=2)
    [ticket] = tickets(state)
    held = place(state, ticket)
    survivors = [address(index) for index in range(2) if address(index).name != held.server]
    state.observe_servers(survivors)
    assert len(state.reservations) == 0 and state.reservations.load(held.server) == (0, 0)
    assert place(state, ticket).server == survivors[0].name
    finish(state, ticket)
    assert len(state.reservations) == 0


def test_restarted_server_ignores_reports_of_old_incarnation():
    state = ready()
    state.servers.publish(version(1))
    late = order(state, 0)
    state.observe_servers([address(0, "2")])
    assert not state.servers.succeeded(late, 0.1, {}) and not state.servers.failed(late, "reset", 0.0)
    assert state.servers.next_order("generation_server/0", "1", 0.0) is None
    fresh = order(state, 0, incarnation="2")
    assert fresh.probe and state.refusal() == "no_server"


def test_drain_waits_for_running_completions():
    state = ready(interruptible=False)
    first, second = tickets(state, 2)
    place(state, first)
    state.servers.publish(version(1))
    made = order(state, 0)
    assert not state.begin_update(made, 0.0)
    with pytest.raises(NoServer):  # nothing new while it drains
        place(state, second)
    assert place(state, first).server == "generation_server/0", "who is there may finish there"
    finish(state, first)
    assert state.begin_update(made, 0.0)
    state.servers.succeeded(made, 0.1, {})
    assert place(state, second).version == 1


def begin(state, index, now):
    """The order of a server that may update now, with its update begun; else the reason to wait."""
    made = state.servers.next_order(f"generation_server/{index}", "1", now)
    if isinstance(made, UpdateOrder):
        assert state.begin_update(made, now)
    return made


def done(state, made, seconds=0.1, **timings):
    assert isinstance(made, UpdateOrder) and state.servers.succeeded(made, seconds, timings)


def test_rolling_updates_oldest_weights_first():
    state = ready(4, pace=Pace(0.5, 30.0), eta=3)
    state.servers.publish(version(1))
    first, second = begin(state, 0, 0.0), begin(state, 1, 1.0)
    assert isinstance(first, UpdateOrder) and isinstance(second, UpdateOrder)
    assert begin(state, 2, 2.0) == Idle(30.0) and begin(state, 3, 2.0) == Idle(30.0)
    done(state, first)
    state.servers.publish(version(2))
    assert isinstance(begin(state, 0, 3.0), Idle), "0 has version 1 already: 2 and 3 are further behind"
    assert isinstance(begin(state, 2, 3.0), UpdateOrder)


def test_rolling_waits_for_hanging_server_once():
    state = ready(3, pace=Pace(0.1, 30.0), eta=3)
    state.servers.publish(version(1))
    assert isinstance(begin(state, 0, 0.0), UpdateOrder), "at least one at a time; this one hangs"
    assert begin(state, 1, 29.0) == Idle(30.0)
    assert isinstance(begin(state, 1, 30.0), UpdateOrder)
    state.observe_servers([address(0), address(2)])  # 1 dies
    assert isinstance(begin(state, 2, 31.0), UpdateOrder)
    hanging = state.servers.get("generation_server/0")
    assert hanging is not None and hanging.state == "updating" and state.refusal() is None


def test_rolling_goes_on_while_failed_server_waits():
    """A server in the delay after a failed update does not keep the slot from the others."""
    state = ready(servers=3, pace=Pace(0.3))
    state.servers.publish(version(1))
    failed = begin(state, 0, 0.0)
    assert isinstance(failed, UpdateOrder)
    state.servers.failed(failed, "checksum", 0.0)
    assert isinstance(begin(state, 0, 0.0), Idle) and isinstance(begin(state, 1, 0.0), UpdateOrder)


def test_rolling_gives_no_slot_to_unused_servers():
    state = ready(4, pace=Pace(0.25, 30.0), eta=1)
    state.servers.publish(version(1))
    assert isinstance(begin(state, 0, 0.0), UpdateOrder)
    state.observe_servers([address(index) for index in range(5)])  # 4 is new
    assert isinstance(begin(state, 4, 0.0), UpdateOrder)
    assert isinstance(begin(state, 2, 0.0), Idle)
    state.servers.publish(version(2))  # now all that have not updated are beyond the bound
    assert all(isinstance(begin(state, index, 0.0), UpdateOrder) for index in (1, 2, 3))


def test_drain_after_restart_waits_for_unplaced_attempts():
    state = ready(interruptible=False)
    [ticket] = tickets(state)
    place(state, ticket)
    restarted = ManagerState(dataclasses.replace(SETTINGS, interruptible=False))
    restarted.restore_from(state.outbox)
    restarted.observe_servers([address(0)])
    restarted.servers.publish(version(0))
    assert not restarted.begin_update(order(restarted, 0), 0.0)
    finish(restarted, ticket)
    assert restarted.begin_update(order(restarted, 0), 0.0)


def test_updates_are_recorded_by_stage():
    state = ready(2)
    state.servers.publish(version(1))
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


def test_probed_server_counts_as_no_update():
    state = ManagerState(SETTINGS)
    state.observe_servers([address(0)])
    state.servers.publish(version(0))
    made = order(state, 0)
    assert made.probe and state.begin_update(made, 0.0) and state.servers.succeeded(made, 0.1, None)
    assert state.refusal() is None
    assert not state.servers.updates.recent and status(state, 1.0, 0.0)["servers"][0]["updates"] == 0


def test_held_request_reports_its_failure_once():
    """It is decided again when the server has answered: an old report must not count again."""
    state = ready()
    [ticket] = tickets(state)
    failed = place(state, ticket).server
    request = ScheduleRequest(ticket.ticket_id, 0, 10, 20, failed_server=failed)
    with pytest.raises(NoServer):
        state.schedule(request, 0.0)
    answer(state, 0, 0)
    for _ in range(2):
        assert state.schedule(request, 0.0).server == failed


def test_one_worker_cannot_remove_healthy_servers():
    """Its network is broken: it reports every server. The others keep all of them, and nothing is loaded again."""
    state = ready(servers=64)
    for index in range(64):
        state.servers.report(f"generation_server/{index}", 0, "broken", "Cannot connect", 0.0)
        assert len(state.router.routes(None)) == 64
        answer(state, index, 0)
    assert all(server.state == "ready" and server.updates == 1 for server in state.servers.all())
    [(worker, reported)] = state.servers.reports.suspects(0.0).items()
    assert worker == "broken" and len(reported) == 3 and state.servers.reports.ignored == 61
    assert status(state, 0.0, 0.0)["blame"]["suspects"] == {"broken": reported}


def test_reporter_is_routed_elsewhere_during_probe():
    state = ready(servers=2)
    mine, other = (state.allocate(AllocateRequest(name, 1), 0.0).tickets[0] for name in ("a", "b"))
    failed = place(state, mine).server
    assert place(state, mine, failed_server=failed).server != failed
    assert place(state, mine, call="1.0").server != failed, "until it has answered"
    assert place(state, other).server == failed, "the other worker has no trouble with it"
    answer(state, int(failed[-1]), 0)
    assert place(state, mine, call="2.0").server == failed


def test_overtaken_probe_changes_nothing():
    """A second worker has reported the server since the probe began: it stays in quarantine for its time."""
    state = ready()
    name = "generation_server/0"
    state.servers.report(name, 0, "a", "reset", 0.0)
    probe = state.servers.next_probe(name, "1", 0.0)
    state.servers.report(name, 0, "b", "reset", 0.0)
    assert isinstance(probe, Probe) and state.servers.answered(probe, "0", "/v0", 0.0) == []
    assert not state.servers.silent(probe, "timeout", 0.0)
    assert state.servers.next_probe(name, "1", 0.0) == Idle(0.5) and state.refusal() == "no_server"


def test_used_versions_are_named_within_bound():
    state = ready(servers=3, eta=2)
    state.servers.publish(version(1))
    slow = order(state, 0)
    state.begin_update(slow, 0.0)
    update(state, 2)
    assert state.servers.in_use() == [0, 1]
    for number in (2, 3):
        state.servers.publish(version(number))
        update(state, 2)
    assert state.servers.in_use() == [1, 3], "0 stages version 1; 1 serves version 0, which is beyond the bound"
    state.servers.failed(slow, "timeout", 9.0)
    assert state.servers.in_use() == [3], "a dead server keeps no version for ever"


def test_new_manager_routes_by_the_reported_loads():
    """Its predecessor has placed calls that it does not know of."""
    state = ready(servers=2)
    state.reservations.report("generation_server/0", sequences=50, tokens=5000, asked=0.0)
    assert {place(state, ticket).server for ticket in tickets(state, 4)} == {"generation_server/1"}


def test_completed_lengths_change_the_route():
    """Many short completions weigh more than few cached tokens until the manager has seen how short they are."""
    state = ready(servers=2)
    state.reservations.report("generation_server/0", sequences=12, tokens=100, asked=0.0)
    state.reservations.report("generation_server/1", sequences=2, tokens=250, asked=0.0)
    first, second = tickets(state, 2)
    assert place(state, first).server == "generation_server/1"
    finish(state, first, answers=1)
    state.router.lengths.add([1] * 2000)
    assert place(state, second).server == "generation_server/0"

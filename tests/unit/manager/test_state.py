"""ManagerState: admission, tickets, evaluations, rates, status."""

from __future__ import annotations

import json
from unittest.mock import Mock

import msgspec
import pytest

from realsys.config.schema import Config
from realsys.manager.decisions import ManagerSettings
from realsys.manager.ledger.events import EvalStarted, EvaluationState, Resumed
from realsys.manager.messages import (
    AllocateRequest,
    EvaluateRequest,
    FinishRequest,
    TouchRequest,
    TrainedRequest,
)
from realsys.manager.operations import status
from realsys.manager.process import LOAD_KEYS
from realsys.manager.routes import render_metrics
from realsys.manager.routing.rollout_workers import memory_sums
from realsys.observe.step_fields import field_of
from tests.support.ledger.manager_states import (
    ANSWER,
    finish,
    order,
    place,
    ready,
    tickets,
    update,
    version,
)


def test_evaluation_means_each_metric_over_its_answers() -> None:
    state = ready()
    state.evaluate(EvaluateRequest("e", "eval", 2), 0.0)
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
        reply = each.evaluations.find("e").reply()
        assert (reply.done, reply.accuracy, reply.metrics) == (2, 1.0, {"turns": 1.5, "x": 5.0})


def test_evaluation_without_right_or_wrong_has_no_accuracy() -> None:
    """An absent number is not 0 %."""
    state = ready()
    state.evaluate(EvaluateRequest("e", "eval", 1), 0.0)
    (ticket,) = tickets(state, 1)
    answer = msgspec.structs.replace(ANSWER, correct=None)
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [answer]), 0.0)
    reply = state.evaluations.find("e").reply()
    assert (reply.done, reply.accuracy) == (1, None)


def test_status_has_the_words_of_the_last_failure() -> None:
    state = ready()
    for ticket, outcome in zip(tickets(state, 2), ("failed", "accepted"), strict=True):
        reason = "RewardError: KeyError: 'word' at mine.py:4" if outcome == "failed" else ""
        state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason), 0.0)
    assert status(state, 0.0, 0.0)["ledger"]["last_failure"] == "RewardError: KeyError: 'word' at mine.py:4"


@pytest.mark.parametrize(("newest", "accuracy", "reason"), [(0, 2 / 3, ""), (1, None, "versions 0 to 1 are mixed")])
def test_evaluation_of_an_older_journal_is_read(newest: int, accuracy: float | None, reason: str) -> None:
    """Its snapshot has sums only, and its versions may be mixed."""
    started = b'{"eval_id":"e","split":"eval","total":3,"seed":0,"version":0,"time":0.0,"type":"eval_started"}'
    older = EvaluationState(msgspec.json.decode(started, type=EvalStarted), [0, 2, 1], correct=2, length=60)
    older.version_min, older.version_max = 0, newest
    state = ready()
    state.restore_from([msgspec.structs.replace(ready().snapshot(0.0), evaluations=[older])])
    reply = state.evaluations.find("e").reply()
    assert (reply.ended, reply.accuracy, reply.incomplete) == (True, accuracy, reason)
    assert reply.tallies == [(1, 0, 1), (1, 1, 2)]


def test_metrics_show_the_verifiers_of_each_worker() -> None:
    state = ready()
    for worker, waiting, undecided in (("w", 7, 1), ("x", 0, 0), ("w", 2, 3)):
        (ticket,) = tickets(state, 1)
        request = FinishRequest(ticket.ticket_id, ticket.attempt, worker, "failed")
        request.verdicts_waiting, request.verdicts_undecided = waiting, undecided
        request.verdict_failures = {"raised": 1, "cpu_time": undecided}
        state.finish(request, 0.0)
    text = render_metrics(state, 0.0)[0].decode()
    assert 'realsys_verdicts_waiting{worker="w"} 2.0' in text
    assert 'realsys_verdicts_undecided_total{worker="w"} 3.0' in text
    assert 'realsys_verdicts_undecided_total{worker="x"} 0.0' in text
    assert 'realsys_verdict_failures_total{cause="raised"} 3.0' in text
    assert 'realsys_verdict_failures_total{cause="cpu_time"} 4.0' in text


def test_call_avoids_busy_server_if_another_serves() -> None:
    state = ready(servers=2)
    (ticket,) = tickets(state, 1)
    first = place(state, ticket).server
    second = place(state, ticket, avoid=first).server
    assert second != first
    alone = ready(servers=1)
    (ticket,) = tickets(alone, 1)
    only = place(alone, ticket).server
    assert place(alone, ticket, avoid=only).server == only


def test_call_returns_to_server_of_last_call() -> None:
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


def test_tokens_are_counted_by_server() -> None:
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


def test_unchanged_heartbeats_look_at_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and counters of a worker change often, and a trial has thousands of tickets."""

    def beat(incarnation: str, state: str) -> dict[str, str]:
        return {"w": json.dumps({"kind": "rollout_worker", "incarnation": incarnation, "state": state})}

    state = ready()
    [ticket] = tickets(state)
    state.observe_workers(beat("a", "starting"), 0.0)
    scan = Mock(wraps=state.ledger.lose)
    monkeypatch.setattr(state.ledger, "lose", scan)
    assert state.observe_workers(beat("a", "rolling out"), 1.0) == [] and scan.call_count == 0
    assert state.expire(1.0) == [] and scan.call_count == 1, "for the leases of all tickets"
    assert state.observe_workers(beat("b", "starting"), 2.0) == [ticket.ticket_id]


@pytest.mark.parametrize("eta", [0, 1])
def test_ticket_waits_until_half_of_the_servers_serve(eta: int) -> None:
    """The first server to serve a version would get the calls of a whole batch."""
    state = ready(servers=4, eta=eta)
    while state.refusal() is None:
        tickets(state)
    state.servers.publish(version(1))
    orders = [order(state, index) for index in range(4)]
    for each in orders:
        state.begin_update(each, 0.0)
    refusals = []
    for each in orders:
        state.servers.succeeded(each, 0.1, {})
        refusals.append(state.refusal())
    assert refusals == ["staleness", None, None, None]


def test_settings_come_from_the_configuration() -> None:
    config = Config()
    made = ManagerSettings.of(config, {"train": 5})
    assert (made.batch_groups, made.eta, made.group_size) == (512, 4, 16)
    assert made.routing == "sticky" and made.interruptible and made.total_steps == config.train.total_steps


def test_resumed_trial_draws_new_seeds() -> None:
    def first_seed(*events: Resumed) -> int:
        state = ready()
        state.restore_from(events)
        state.servers.publish(version(5))
        update(state, 0)
        return state.allocate(AllocateRequest("w", 1), 0.0).tickets[0].seed

    assert first_seed() != first_seed(Resumed("/c", 5, 10, 12, [], 0.0))


def test_memory_of_servers_and_workers_is_shown() -> None:
    """In the rows of workers, in /metrics, and as sums in the reply to the trainer. An ended worker has none."""
    state = ready()
    beat = {"index": 0, "host": "h", "pid": 1, "incarnation": "1", "state": "rolling out"}
    names = ("rollout_worker/0", "rollout_worker/1", "generation_server/0")
    beats = {name: json.dumps({**beat, "kind": name.partition("/")[0]}) for name in names}
    state.observe_workers(beats, 0.0)
    for server in state.servers.all():
        server.load = dict.fromkeys(LOAD_KEYS, 0.0) | {"memory_bytes": 300.0, "gpu_peak_bytes": 50.0}
    (ticket,) = tickets(state, 1)
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "rollout_worker/0", "failed", memory_bytes=7), 0.0)
    state.touch(TouchRequest("rollout_worker/1", [], 5), 0.0)
    state.touch(TouchRequest("rollout_worker/9", [], 9), 0.0)
    rows = {row["name"]: row["memory_bytes"] for row in status(state, 0.0, 0.0)["workers"]}
    assert (rows["rollout_worker/0"], rows["rollout_worker/1"]) == (7, 5)
    text = render_metrics(state, 0.0)[0].decode()
    assert 'realsys_process_memory_bytes{process="rollout_worker/0"} 7.0' in text and "rollout_worker/9" not in text
    assert "realsys_process_gpu_peak_bytes{process=" in text
    sums = state.trained(TrainedRequest(step=1, version=1), 0.0).memory
    assert (sums["worker_bytes"], sums["workers_bytes"]) == (7, 12)


def test_sums_of_memory_have_the_names_of_the_step_log() -> None:
    sizes = {"generation_server/0": 3, "generation_server/1": 4, "rollout_worker/0": 5}
    assert memory_sums(sizes) == {"server_bytes": 4, "servers_bytes": 7, "worker_bytes": 5, "workers_bytes": 5}
    assert memory_sums({}) == {}
    assert all(field_of("train", f"memory/{name}") for name in memory_sums(sizes))

"""ManagerState: admission, tickets, evaluations, rates, status."""

import dataclasses
import json
from unittest.mock import Mock

import msgspec
import pytest

from realsys.config.schema import Config
from realsys.errors import LedgerError
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.ledger.events import EvalStarted, EvaluationState, Opened, Resumed, RolledBack, Trained
from realsys.manager.ledger.pinned_evaluations import MOST_RESTARTS
from realsys.manager.messages import (
    AllocateRequest,
    BadCall,
    CancelRequest,
    EvaluateRequest,
    FinishRequest,
    NotFound,
    NotRunning,
    TouchRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.operations import status
from realsys.manager.process import LOAD_KEYS
from realsys.manager.routes import render_metrics
from realsys.manager.routing.rollout_workers import memory_sums
from realsys.observe.step_fields import field_of
from tests.support.ledger.manager_states import (
    ANSWER,
    SETTINGS,
    A,
    B,
    address,
    finish,
    order,
    place,
    published,
    ready,
    replayed,
    running,
    serve,
    start,
    tickets,
    trained,
    update,
    version,
)


def test_evaluation_means_each_metric_over_its_answers():
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


def test_evaluation_without_right_or_wrong_has_no_accuracy():
    """An absent number is not 0 %."""
    state = ready()
    state.evaluate(EvaluateRequest("e", "eval", 1), 0.0)
    (ticket,) = tickets(state, 1)
    answer = msgspec.structs.replace(ANSWER, correct=None)
    state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [answer]), 0.0)
    reply = state.evaluations.find("e").reply()
    assert (reply.done, reply.accuracy) == (1, None)


def test_status_has_the_words_of_the_last_failure():
    state = ready()
    for ticket, outcome in zip(tickets(state, 2), ("failed", "accepted"), strict=True):
        reason = "RewardError: KeyError: 'word' at mine.py:4" if outcome == "failed" else ""
        state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", outcome, reason), 0.0)
    assert status(state, 0.0, 0.0)["ledger"]["last_failure"] == "RewardError: KeyError: 'word' at mine.py:4"


@pytest.mark.parametrize(("newest", "accuracy", "reason"), [(0, 2 / 3, ""), (1, None, "versions 0 to 1 are mixed")])
def test_evaluation_of_an_older_journal_is_read(newest, accuracy, reason):
    """Its snapshot has sums only, and its versions may be mixed."""
    started = b'{"eval_id":"e","split":"eval","total":3,"seed":0,"version":0,"time":0.0,"type":"eval_started"}'
    older = EvaluationState(msgspec.json.decode(started, type=EvalStarted), [0, 2, 1], correct=2, length=60)
    older.version_min, older.version_max = 0, newest
    state = ready()
    state.restore_from([msgspec.structs.replace(ready().snapshot(0.0), evaluations=[older])])
    reply = state.evaluations.find("e").reply()
    assert (reply.ended, reply.accuracy, reply.incomplete) == (True, accuracy, reason)
    assert reply.tallies == [(1, 0, 1), (1, 1, 2)]


def test_metrics_show_the_verifiers_of_each_worker():
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


def test_call_avoids_busy_server_if_another_serves():
    state = ready(servers=2)
    (ticket,) = tickets(state, 1)
    first = place(state, ticket).server
    second = place(state, ticket, avoid=first).server
    assert second != first
    alone = ready(servers=1)
    (ticket,) = tickets(alone, 1)
    only = place(alone, ticket).server
    assert place(alone, ticket, avoid=only).server == only


def test_call_returns_to_server_of_last_call():
    state = ready(servers=3)
    first, second = tickets(state, 2)
    held = place(state, first, call="0.0")
    place(state, second, call="0.0")
    ended = (first.ticket_id, first.attempt, "0.0")
    again = place(state, first, call="0.1", previous=(held.server, held.version), released=[ended])
    assert again.server == held.server and state.reservations.calls(first.ticket_id) == ["0.1"]
    other = place(state, first, call="1.1", previous=(held.server, held.version + 1))
    assert other.server != held.server, "its cache is of other weights"


def test_release_of_an_older_attempt_changes_nothing():
    state = ready()
    [ticket] = tickets(state)
    finish(state, ticket, "failed")
    [again] = tickets(state)
    place(state, again, call="0.0")
    place(state, again, call="1.0", released=[(ticket.ticket_id, ticket.attempt, "0.0")])
    assert (again.attempt, state.reservations.calls(again.ticket_id)) == (1, ["0.0", "1.0"])


def test_tokens_are_counted_by_server():
    state = ready(servers=2)
    [ticket] = tickets(state)
    servers = {"generation_server/0": 10, "generation_server/1": 20, "gone": 5}
    request = FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", [ANSWER], servers)
    state.finish(request, 0.0)
    assert [row["tokens_per_s"] for row in status(state, 1.0, 0.0)["servers"]] == pytest.approx([10.0, 20.0])


def test_answers_are_counted_once_and_by_server():
    state = ready()
    [ticket] = tickets(state)
    place(state, ticket)
    finish(state, ticket, answers=4)
    finish(state, ticket, answers=4)
    shown = status(state, 1.0, 0.0)
    assert shown["throughput"]["generated_tokens"] == 120 and shown["throughput"]["answers"] == {"stop": 4}
    assert shown["servers"][0]["tokens_per_s"] == pytest.approx(120.0)
    json.dumps(shown, allow_nan=False)


def test_unchanged_heartbeats_look_at_no_ticket(monkeypatch):
    """State and counters of a worker change often, and a trial has thousands of tickets."""

    def beat(incarnation, state):
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
def test_ticket_waits_until_half_of_the_servers_serve(eta):
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


def test_resumed_trial_draws_new_seeds():
    def first_seed(*events):
        state = ready()
        state.restore_from(events)
        state.servers.publish(version(5))
        update(state, 0)
        return state.allocate(AllocateRequest("w", 1), 0.0).tickets[0].seed

    assert first_seed() != first_seed(Resumed("/c", 5, 10, 12, [], 0.0))


def test_memory_of_servers_and_workers_is_shown():
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


def test_sums_of_memory_have_the_names_of_the_step_log():
    sizes = {"generation_server/0": 3, "generation_server/1": 4, "rollout_worker/0": 5}
    assert memory_sums(sizes) == {"server_bytes": 4, "servers_bytes": 7, "worker_bytes": 5, "workers_bytes": 5}
    assert memory_sums({}) == {}
    assert all(field_of("train", f"memory/{name}") for name in memory_sums(sizes))


# ---- Calls of the trainer: journal records of /trained and /finish_rollout, repetitions, bounds of numbers


def test_oldest_versions_are_journalled_once():
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


def test_a_step_that_is_told_again_shows_once():
    """Its first reply was lost."""
    state = running()
    for number in (1, 1, 2):
        trained(state, number, [], A, staleness={"0": number})
    assert [(step.version, step.histogram) for step in state.staleness] == [(1, {"0": 1}), (2, {"0": 2})]


def test_tokens_of_failed_episodes_reach_the_trainer():
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
def test_numbers_that_no_ledger_can_hold_are_refused(body):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"step": 1} | body), type=TrainedRequest)


def test_finished_tells_the_versions_of_the_answers():
    state = running()
    first, second = tickets(state, 2)
    answers = [type(ANSWER)(0.0, False, 3, "stop", low, high) for low, high in ((2, 3), (1, 2))]
    state.finish(FinishRequest(first.ticket_id, 0, "w", "accepted", "", answers), 0.0)
    state.finish(FinishRequest(second.ticket_id, 0, "w", "failed", "x"), 0.0)
    versions = [(e.version_min, e.version_max) for e in state.outbox[-2:]]  # type: ignore[union-attr]
    assert versions == [(1, 3), (-1, -1)]


# ---- Roll-backs of ManagerState: journal records, servers, settings. Further: scenarios/roll_back.txt


def test_roll_back_is_one_record():
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


def test_evaluation_of_undone_version_is_discarded():
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


def test_update_from_before_roll_back_verifies_nothing():
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


def test_roll_back_ends_a_drain():
    state = running()
    state.settings = dataclasses.replace(SETTINGS, interruptible=False)
    [ticket] = tickets(state)
    place(state, ticket)
    assert state.servers.publish(published(1, A))
    assert not state.begin_update(order(state, 0), 0.0)
    start(state, 0, B)
    serve(state, 0, B)
    assert state.refusal() is None


def test_settings_are_recorded_when_changed():
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


def test_tickets_of_another_order_of_prompts_are_refused():
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


def test_status_shows_the_training_side():
    state = running()
    start(state, 0, B)
    shown = status(state, 1.0, 0.0)
    assert (shown["ledger"]["trainer_incarnation"], shown["ledger"]["starts"]) == (B, 2)
    json.dumps(shown, allow_nan=False)


# ---- Evaluations that a user requests from a trial in training


ID = "user-1-eval"


def asked(state, problems=2, incarnation="", *, by_user=True):
    state.evaluate(EvaluateRequest(ID, "eval", problems, incarnation=incarnation, by_user=by_user), 0.0)


def reply(state):
    return state.evaluations.find(ID).reply()


def evaluated(state, count):
    return [ticket for ticket in tickets(state, count) if ticket.kind == "eval"]


def cancel(state):
    return state.cancel_evaluation(CancelRequest(ID), 1.0).cancelled


def test_user_needs_no_incarnation():
    state = running()
    asked(state)
    for ticket in evaluated(state, 2):
        finish(state, ticket)
    assert reply(state).ended and reply(state).accuracy == 1.0


def test_trainer_never_sees_evaluations_of_users():
    """A trainer repeats every evaluation that it finds without a result."""
    state = running()
    asked(state)
    start(state, 0, B)
    assert state.evaluations.ever_started() == []


def test_cancelled_evaluation_ends_without_numbers():
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


def test_cancelled_evaluation_grants_nothing_more():
    state = running()
    asked(state)
    cancel(state)
    assert evaluated(state, 4) == []
    assert not cancel(state), "a second call changes nothing"


def test_evaluation_of_the_trainer_cannot_be_cancelled():
    state = running()
    asked(state, incarnation=A, by_user=False)
    with pytest.raises(BadCall, match="requested by the trainer"):
        cancel(state)


def test_unknown_evaluation_cannot_be_cancelled():
    with pytest.raises(NotFound):
        cancel(running())


def test_roll_back_begins_it_again_with_new_weights():
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


def test_trainer_that_never_stays_ends_it_incomplete():
    state = running()
    asked(state)
    for number in range(MOST_RESTARTS + 1):
        start(state, 0, f"{int(B) + number:019d}")
    assert reply(state).ended and "the trainer went back to version 0" in reply(state).incomplete


def test_supervised_run_grants_evaluations_alone():
    config = Config.model_validate({"train": {"ppo": {"algorithm": "sft"}}})
    settings = ManagerSettings.of(config, {"train": 0, "eval": 3})
    state = ready(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})
    assert tickets(state, 2) == [] and state.refusal() == "paused"
    assert "evaluations alone" in status(state, 0.0, 0.0)["admission"]["explanation"]
    state.evaluate(EvaluateRequest("e", "eval", 2), 0.0)
    assert [ticket.ticket_id.startswith("eval-") for ticket in tickets(state, 3)] == [True, True]

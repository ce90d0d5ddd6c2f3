"""What the page says about a run, from its folder alone."""

import pytest

from realsys.manager.ledger import events as e
from realsys.manager.ledger.journal import Journal
from realsys.observe.page import trial_reader as module
from realsys.observe.page.trial_reader import (
    COLUMNS,
    MOST_NOTES,
    MOST_POINTS,
    SENT_POINTS,
    Curves,
    TrialReader,
    ledger_counts,
)
from realsys.observe.step_fields import field_of
from realsys.observe.step_log import Event, EventLog
from tests.support.view.shown_trial import START, STEPS, events, sample_trial, step_log


def test_ended_run_is_told_from_its_folder(tmp_path):
    paths = sample_trial(tmp_path)
    run = TrialReader(paths, lambda: False).run()
    assert (run["experiment"], run["trial"], run["state"]) == ("demo", "shown", "done")
    assert run["progress"] == {"kind": "step", "done": STEPS, "total": STEPS}
    assert run["bottleneck"].startswith("generation-bound: the trainer waits 45 %")
    assert run["split"]["parts"]["wait"][1] == 45
    assert dict(run["identity"])["allocation"] == "serve.d1p1m1+d2p1m1"
    assert [made["accuracy"] for made in run["evaluations"]] == [None, 0.74, 0.58, 0.41]
    assert run["restarts"] == 1 and run["notes"][0]["kind"] == "stop"


def test_trial_without_summary_was_killed(tmp_path):
    paths = sample_trial(tmp_path)
    paths.summary.unlink()
    assert TrialReader(paths, lambda: False).run()["state"] == "killed"
    assert TrialReader(paths, lambda: True).run()["state"] == "running"


def test_curves_are_sent_when_they_changed(tmp_path):
    paths = sample_trial(tmp_path)
    reader = TrialReader(paths, lambda: True)
    first = reader.curve_document(-1)
    assert reader.curve_document(first["seen"]) == {"seen": first["seen"]}
    with paths.steps.open("a") as file:
        file.write('{"kind": "train", "step": 41, "time": 1}\n')
    assert reader.curve_document(first["seen"])["columns"]["step"][-1] == STEPS + 1


def test_many_notes_remove_no_mark(tmp_path):
    paths = sample_trial(tmp_path)
    log = EventLog(paths.events)
    for number in range(MOST_NOTES + 5):
        log.add("note", f"note {number}")
    reader = TrialReader(paths, lambda: True)
    assert [mark["kind"] for mark in reader.curve_document(-1)["marks"]] == ["rolled_back", "restart"]
    assert len(reader.run()["notes"]) == MOST_NOTES


def test_resumed_start_is_sent_at_once(tmp_path):
    paths = sample_trial(tmp_path)
    reader = TrialReader(paths, lambda: True)
    seen = reader.curve_document(-1)["seen"]
    EventLog(paths.events).add("start", "continues after step 40")
    marks = reader.curve_document(seen)["marks"]
    assert (marks[-1]["kind"], marks[-1]["step"]) == ("start", STEPS + 0.5)


def test_ledger_is_counted_from_the_journal(tmp_path):
    paths = sample_trial(tmp_path)
    with Journal(paths.ledger) as journal:
        granted = [e.Granted(f"{n:010d}", 0, n, n, "rollout_worker/0", "i", 0, 1.0) for n in range(3)]
        journal.append([*granted, e.Finished("0000000001", 0, "accepted", "", False, 2.0)])
    counts = ledger_counts(paths)
    assert (counts["granted"], counts["running"], counts["finished"]) == (3, 2, 1)
    paths.ledger.write_bytes(b"no ledger\n" + paths.ledger.read_bytes())
    assert TrialReader(paths, lambda: False).run()["ledger"] is None


# ---- Curves of the page: bounded points, roll-backs, marks, evaluations without half numbers


def train(step, **fields):
    return {"kind": "train", "step": step, "total": 9, "time": 10.0 * step, "reward_mean": float(step), **fields}


def test_long_run_keeps_bounded_points(monkeypatch):
    monkeypatch.setattr(module, "MOST_POINTS", 64)
    curves = Curves()
    curves.add(train(step, staleness={"min": step % 7, "mean": 1.0, "max": step % 9}) for step in range(1, 1001))
    assert len(curves.points) < 64
    columns = curves.columns()
    assert columns["step"][-1] == 1000 and columns["step"] == sorted(columns["step"], key=lambda step: step or 0)
    assert set(columns["stale_min"]) == {0} and set(columns["stale_max"][:-1]) == {8}
    assert columns["reward"][0] == pytest.approx((columns["step"][0] + 1) / 2)


def test_page_gets_at_most_so_many_points():
    curves = Curves()
    curves.add(train(step) for step in range(1, MOST_POINTS))
    assert SENT_POINTS / 2 < len(curves.columns()["step"]) <= SENT_POINTS


def test_recovery_removes_the_undone_steps():
    curves = Curves()
    curves.add(step_log())
    columns = curves.columns()
    assert columns["step"] == list(range(1, STEPS + 1))
    assert columns["time"][20] > START + 3.1 * 23  # step 21 as it was trained again


def test_progress_goes_back_with_a_recovery():
    curves = Curves()
    curves.add([train(1), train(2), train(3), {"kind": "recovered", "step": 1, "time": 35.0}])
    assert curves.progress == ("step", 1, 9)
    curves.add([{"kind": "recovered", "step": -1, "time": 36.0}])
    assert curves.progress == ("step", 0, 9)


def test_marks_are_in_the_order_of_the_axis():
    """The page draws one line for neighbours: it must meet them one after the other."""
    curves = Curves()
    curves.add(train(step) for step in range(1, 9))
    curves.add({"kind": "recovered", "step": step, "time": 100.0 - step} for step in (6, 2))
    assert [mark["step"] for mark in curves.marks([])] == [2.5, 6.5]


def test_restart_lies_between_its_steps():
    curves = Curves()
    curves.add(step_log())
    marks = curves.marks(Event(**event) for event in events())
    assert [(mark["kind"], mark["step"]) for mark in marks] == [("rolled_back", 20.5), ("restart", 20.5)]


def test_evaluation_of_another_set_is_not_held_out():
    curves = Curves()
    curves.add({"kind": "eval", "eval_id": "e", "step": 3, "accuracy": 1.0, "set": name} for name in ("eval", "sums"))
    assert [made["held_out"] for made in curves.evaluations] == [True, False]


def test_incomplete_evaluation_has_no_number():
    curves = Curves()
    curves.add(
        [{"kind": "eval", "eval_id": "e", "step": 3, "accuracy": 1.0, "complete": False, "incomplete": "2 left"}]
    )
    [made] = curves.evaluations
    assert made["accuracy"] is None and made["incomplete"] == "2 left" and made["headline"] == "incomplete: 2 left"


@pytest.mark.parametrize("bad", [{"step": None}, {"time": "x"}, {"stats": [1]}, {"reward_mean": float("nan")}])
def test_strange_record_does_not_stop_the_page(bad):
    curves = Curves()
    curves.add([{**train(1), **bad}, train(2)])
    assert curves.columns()["step"][-1] == 2
    assert isinstance(curves.marks([Event(15.0, "restart", "x", "w/0")]), list)


def test_every_column_is_a_field_of_the_log():
    """A curve of a number that no step log has would stay empty without a word."""
    names = ["/".join(place) for place in COLUMNS.values()]
    fields = {name: field_of("train", name) for name in names}
    assert [name for name, found in fields.items() if found is None or "{" in found.field.name] == []

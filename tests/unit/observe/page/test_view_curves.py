"""Curves of the page: bounded points, roll-backs, marks, evaluations without half numbers."""

from __future__ import annotations

import pytest

from realsys.observe.page import trial_reader as module
from realsys.observe.page.trial_reader import COLUMNS, MOST_POINTS, SENT_POINTS, Curves
from realsys.observe.step_fields import field_of
from realsys.observe.step_log import Event
from tests.support.view.shown_trial import START, STEPS, events, step_log


def train(step: int, **fields: object) -> dict[str, object]:
    return {"kind": "train", "step": step, "total": 9, "time": 10.0 * step, "reward_mean": float(step), **fields}


def test_long_run_keeps_bounded_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_POINTS", 64)
    curves = Curves()
    curves.add(train(step, staleness={"min": step % 7, "mean": 1.0, "max": step % 9}) for step in range(1, 1001))
    assert len(curves.points) < 64
    columns = curves.columns()
    assert columns["step"][-1] == 1000 and columns["step"] == sorted(columns["step"], key=lambda step: step or 0)
    assert set(columns["stale_min"]) == {0} and set(columns["stale_max"][:-1]) == {8}
    assert columns["reward"][0] == pytest.approx((columns["step"][0] + 1) / 2)


def test_page_gets_at_most_so_many_points() -> None:
    curves = Curves()
    curves.add(train(step) for step in range(1, MOST_POINTS))
    assert SENT_POINTS / 2 < len(curves.columns()["step"]) <= SENT_POINTS


def test_recovery_removes_the_undone_steps() -> None:
    curves = Curves()
    curves.add(step_log())
    columns = curves.columns()
    assert columns["step"] == list(range(1, STEPS + 1))
    assert columns["time"][20] > START + 3.1 * 23  # step 21 as it was trained again


def test_progress_goes_back_with_a_recovery() -> None:
    curves = Curves()
    curves.add([train(1), train(2), train(3), {"kind": "recovered", "step": 1, "time": 35.0}])
    assert curves.progress == ("step", 1, 9)
    curves.add([{"kind": "recovered", "step": -1, "time": 36.0}])
    assert curves.progress == ("step", 0, 9)


def test_marks_are_in_the_order_of_the_axis() -> None:
    """The page draws one line for neighbours: it must meet them one after the other."""
    curves = Curves()
    curves.add(train(step) for step in range(1, 9))
    curves.add({"kind": "recovered", "step": step, "time": 100.0 - step} for step in (6, 2))
    assert [mark["step"] for mark in curves.marks([])] == [2.5, 6.5]


def test_restart_lies_between_its_steps() -> None:
    curves = Curves()
    curves.add(step_log())
    marks = curves.marks(Event(**event) for event in events())
    assert [(mark["kind"], mark["step"]) for mark in marks] == [("rolled_back", 20.5), ("restart", 20.5)]


def test_evaluation_of_another_set_is_not_held_out() -> None:
    curves = Curves()
    curves.add({"kind": "eval", "eval_id": "e", "step": 3, "accuracy": 1.0, "set": name} for name in ("eval", "sums"))
    assert [made["held_out"] for made in curves.evaluations] == [True, False]


def test_incomplete_evaluation_has_no_number() -> None:
    curves = Curves()
    curves.add(
        [{"kind": "eval", "eval_id": "e", "step": 3, "accuracy": 1.0, "complete": False, "incomplete": "2 left"}]
    )
    [made] = curves.evaluations
    assert made["accuracy"] is None and made["incomplete"] == "2 left" and made["headline"] == "incomplete: 2 left"


@pytest.mark.parametrize("bad", [{"step": None}, {"time": "x"}, {"stats": [1]}, {"reward_mean": float("nan")}])
def test_strange_record_does_not_stop_the_page(bad: dict[str, object]) -> None:
    curves = Curves()
    curves.add([{**train(1), **bad}, train(2)])
    assert curves.columns()["step"][-1] == 2
    assert isinstance(curves.marks([Event(15.0, "restart", "x", "w/0")]), list)


def test_every_column_is_a_field_of_the_log() -> None:
    """A curve of a number that no step log has would stay empty without a word."""
    names = ["/".join(place) for place in COLUMNS.values()]
    fields = {name: field_of("train", name) for name in names}
    assert [name for name, found in fields.items() if found is None or "{" in found.field.name] == []

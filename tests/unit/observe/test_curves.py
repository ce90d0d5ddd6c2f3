"""Panels and marks of curves.png."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.observe import curves
from realsys.observe.curves import draw_curves
from realsys.observe.step_log import Event
from tests.support.run_logs import START, run_records, train_record, write_log

Drawn = Callable[[list[dict[str, Any]]], dict[str, Axes]]


@pytest.fixture
def paths(tmp_path: Path) -> TrialPaths:
    return TrialPaths(tmp_path)


@pytest.fixture
def drawn(paths: TrialPaths, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Return the panels of a step log by their titles."""

    def draw(records: list[dict[str, Any]]) -> dict[str, Axes]:
        write_log(paths, records)
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", lambda figure: None)
            draw_curves(Config(), paths)
        figure = pyplot.gcf()
        pyplot.close()
        return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_visible()}

    return draw


def places(axis: Axes) -> list[float]:
    """Return where vertical lines are."""
    return [float(line.get_xdata()[0]) for line in axis.lines if list(line.get_ydata()) == [0, 1]]


def test_restarts_and_evaluations_are_in_each_panel(paths: TrialPaths, drawn: Drawn) -> None:
    events = [Event(START, "start", ""), Event(START + 125, "restart", "died", "rollout_worker/0")]
    paths.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    for axis in drawn(run_records()).values():
        assert places(axis) == [2.5]
        assert [list(line.get_xdata()) for line in axis.lines if line.get_marker() == "^"] == [[0, 4]]


def test_roll_back_of_an_older_trial_is_marked(drawn: Drawn) -> None:
    """A trial without events has the recoveries of its step log."""
    records = run_records()[:9]
    panels = drawn([*records, {"kind": "recovered", "step": 2, "time": START + 200}, train_record(3)])
    assert all(places(axis) == [2.5] for axis in panels.values())


def test_parts_of_time_add_up_to_step(drawn: Drawn) -> None:
    axis = drawn([train_record(step) for step in range(1, 5)])["Time of a step (s)"]
    labels = axis.get_legend_handles_labels()[1]
    assert labels == ["wait", "inf", "train", "save", "publish", "other"]
    top = max(float(path.vertices[:, 1].max()) for each in axis.collections for path in each.get_paths())
    assert top == pytest.approx(7.0)


def test_bad_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 0)
    assert curves.main([str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("realsys: config: ") and error.count("\n") == 1
    assert curves.main([]) == 2 and capsys.readouterr().err.endswith("TRIAL_DIR\n")


def test_step_without_parts_has_no_panel_of_them(drawn: Drawn) -> None:
    panels = drawn([train_record(step, seconds={"total": 2.0}) for step in (1, 2)])
    assert "Time of a step (s)" not in panels and "Accuracy" in panels


def test_panels_follow_what_was_measured(drawn: Drawn) -> None:
    assert "Behaviour weight w" not in drawn(run_records())
    stats = {"w_mean": 1.0, "w_max": 3.0, "entropy_mean": 0.5, "kl_behav_prox_mean": 0.01, "clip_fraction": 0.1}
    panels = drawn([train_record(step, stats=stats, reward_mean=0.5, accuracy=0.5) for step in (1, 2, 3)])
    assert {"Behaviour weight w", "Entropy (nats)", "KL (nats)"} <= panels.keys()
    assert "Mean reward" not in panels and "Accuracy" in panels  # they would be the same curve


def test_weights_of_steps_without_signal_are_drawn(drawn: Drawn) -> None:
    """A logarithmic axis cannot show 0; the warning would be printed to the user."""
    weights = {"w_mean": 0.0, "w_max": 0.0}
    axis = drawn([train_record(step, stats=weights) for step in (1, 2, 3)])["Behaviour weight w"]
    assert axis.get_yscale() == "linear"
    mixed = [train_record(1, stats=weights), train_record(2, stats={"w_mean": 1.0, "w_max": 3.0})]
    assert drawn(mixed)["Behaviour weight w"].get_yscale() == "log"

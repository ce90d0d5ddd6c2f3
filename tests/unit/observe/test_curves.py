"""Panels and marks of curves.png."""

import os

import pytest
from matplotlib import pyplot

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.observe import curves
from realsys.observe.curves import draw_curves
from realsys.observe.screen.progress import OTHER, TIME_PARTS
from tests.support.run_logs import train_record, write_log


@pytest.fixture
def paths(tmp_path):
    return TrialPaths(tmp_path)


@pytest.fixture
def drawn(paths, monkeypatch):
    """Return the panels of a step log by their titles."""

    def draw(records):
        write_log(paths, records)
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", lambda figure: None)
            draw_curves(Config(), paths)
        figure = pyplot.gcf()
        pyplot.close()
        return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_visible()}

    return draw


def test_bad_folder_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: 0)
    assert curves.main([str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("realsys: config: ") and error.count("\n") == 1
    assert curves.main([]) == 2 and capsys.readouterr().err.endswith("TRIAL_DIR\n")


def test_weights_of_steps_without_signal_are_drawn(drawn):
    """A logarithmic axis cannot show 0; the warning would be printed to the user."""
    weights = {"w_mean": 0.0, "w_max": 0.0}
    axis = drawn([train_record(step, stats=weights) for step in (1, 2, 3)])["Behaviour weight w"]
    assert axis.get_yscale() == "linear"
    mixed = [train_record(1, stats=weights), train_record(2, stats={"w_mean": 1.0, "w_max": 3.0})]
    assert drawn(mixed)["Behaviour weight w"].get_yscale() == "log"


def test_each_part_of_a_step_has_a_colour():
    assert curves._PARTS.keys() == {*TIME_PARTS, OTHER}

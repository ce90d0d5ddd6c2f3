"""`realsys simulate`: prints and writes the measurements; a broken invariant is an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.launch.cli import main
from realsys.manager.decisions import ManagerState

SMALL = ["train.batch_groups=2", "rollout.group_size=2", "sim.steps=3"]


def test_measurements_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "pareto", *SMALL, "--seed", "3", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["seed"], written["steps"]) == (3, 3)
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    assert any("3 steps" in line for line in lines) and lines == [line.rstrip() for line in lines]


def test_broken_invariant_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ManagerState, "refusal", lambda self: None)
    assert main(["simulate", "pareto", *SMALL]) == 1
    assert "to repeat it: realsys simulate pareto train.batch_groups=2" in capsys.readouterr().err


def test_unknown_scenario_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nothing"]) == 2
    assert "must be one of lognormal, pareto, faults" in capsys.readouterr().err

"""`realsys why` and `realsys trace`: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from realsys.launch.cli import main
from tests.support.timelines.made_up import MadeUpTrial, small_trial


@pytest.fixture
def trial(tmp_path: Path) -> MadeUpTrial:
    made = small_trial(tmp_path / "trial")
    (made.root / "config.json").write_text("{}")
    return made


def test_why_prints_shares_that_add_up(trial: MadeUpTrial, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(trial.root)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("generation-bound: the trainer waits")
    assert re.findall(r"^sum +[\d.]+ +(\d+)", printed, re.MULTILINE) == ["100", "74", "100"]
    assert "decode 40 %" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert not re.search(r" $", printed, re.MULTILINE)  # a table fills its last column with blanks


def test_why_prints_json(trial: MadeUpTrial, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(trial.root), "--json", "--steps", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["covered"] == 1
    assert sum(report["waits"].values()) == pytest.approx(report["parts"]["wait"])


def test_trace_names_its_file(trial: MadeUpTrial, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["trace", str(trial.root), "--out", str(out), "--ticket", "7"]) == 0
    assert "processes over" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize("steps", ["a:b", "1-3", "1:2:3"])
def test_unreadable_steps_are_refused(trial: MadeUpTrial, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["trace", str(trial.root), "--steps", steps])
    assert end.value.code == 2
    assert "must be A:B, A:, :B or N" in capsys.readouterr().err


def test_trial_without_steps_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["why", str(tmp_path)]) == 2
    assert "no train step has ended" in capsys.readouterr().err

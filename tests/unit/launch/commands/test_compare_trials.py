"""`realsys compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.fields import replaced
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.observe import totals
from tests.support.run_logs import run_records, train_record, write_log


def made(root: Path, name: str, lr: float, steps: int) -> TrialPaths:
    paths = TrialPaths(root / "math" / name)
    paths.root.mkdir(parents=True)
    write_config(replaced(Config(trial=name), ["train", "optimizer", "lr"], lr), paths.config)
    write_log(paths, run_records()[: 5 + steps])
    return paths


def test_comparison_has_settings_numbers_and_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 4), made(tmp_path, "b", 1e-3, 2)
    assert main(["compare", str(first.root), str(second.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split()[-2:] for line in lines if line.strip()}
    assert rows["train.optimizer.lr"] == ["0.0001", "0.001"] and "trial" not in rows
    assert rows["steps"] == ["4", "2"] and rows["s per step"] == ["7.00", "7.00"]
    assert rows["held out, before"] == ["41.0%", "41.0%"]
    place = lines.index("accuracy, 0.5 to 1")
    first_line, second_line = lines[place + 1], lines[place + 2]
    assert first_line.split()[1:] == ["▁▂▄▅", "0.8"] and second_line.split()[1:] == ["▁▂", "0.6"]


def test_field_that_an_older_build_lacks_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    settings = json.loads(first.config.read_text())
    del settings["telemetry"]
    first.config.write_text(json.dumps(settings))
    assert main(["compare", str(first.root), str(second.root)]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("telemetry")]
    assert len(row.split("  ")) > 2 and row.endswith("…")


def test_field_that_has_another_name_now_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    settings = json.loads(first.config.read_text())
    settings["asynchronous"]["max_head_offpolicyness"] = 2 + settings["asynchronous"].pop("max_staleness")
    first.config.write_text(json.dumps(settings))
    assert main(["compare", str(first.root), str(second.root)]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("asynchronous")]
    assert row == ["asynchronous.max_staleness", "6", "4"]


def test_equal_columns_are_equal_steps_in_long_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long curve has one point for several steps."""
    monkeypatch.setattr(totals, "CURVE_POINTS", 40)
    trials = [made(tmp_path, name, 1e-4, 0) for name in "ab"]
    for paths, steps in zip(trials, (40, 80), strict=True):
        write_log(paths, [train_record(step, accuracy=0.5) for step in range(1, steps + 1)])
    assert main(["compare", *(str(paths.root) for paths in trials)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("accuracy, 0.5 to 0.75")
    assert [len(line.split()[1]) for line in lines[place + 1 : place + 3]] == [20, 40]


def test_config_that_is_no_object_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    second.config.write_text("[]")
    assert main(["compare", str(first.root), str(second.root)]) == 2
    assert "must contain a JSON object" in capsys.readouterr().err


def test_one_trial_is_not_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(made(tmp_path, "a", 1e-4, 1).root)]) == 2
    assert "name two or more" in capsys.readouterr().err

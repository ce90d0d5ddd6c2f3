"""`realsys compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.config.dump import write_config
from realsys.config.fields import replaced
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.cli import main
from tests.support.run_logs import run_records, write_log


def made(root: Path, name: str, lr: float, steps: int) -> TrialPaths:
    paths = TrialPaths(root / "math" / name)
    paths.root.mkdir(parents=True)
    write_config(replaced(Config(trial=name), ["train", "optimizer", "lr"], lr), paths.config)
    write_log(paths, run_records()[: 5 + steps])
    return paths


def test_comparison_has_settings_numbers_and_courses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 4), made(tmp_path, "b", 1e-3, 2)
    assert main(["compare", str(first.root), str(second.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split()[-2:] for line in lines if line.strip()}
    assert rows["train.optimizer.lr"] == ["0.0001", "0.001"] and "trial" not in rows
    assert rows["steps"] == ["4", "2"] and rows["s per step"] == ["7.00", "7.00"]
    assert rows["held out, before"] == ["41.0%", "41.0%"]
    place = lines.index("accuracy, 0 to 1")
    first_line, second_line = lines[place + 1], lines[place + 2]
    assert first_line.split()[1:] == ["▅▅▆▇", "0.8"] and second_line.split()[1:] == ["▅▅", "0.6"]


def test_field_that_an_older_build_lacks_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    settings = json.loads(first.config.read_text())
    del settings["telemetry"]
    first.config.write_text(json.dumps(settings))
    assert main(["compare", str(first.root), str(second.root)]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("telemetry")]
    assert len(row.split("  ")) > 2 and row.endswith("…")


def test_one_trial_is_not_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(made(tmp_path, "a", 1e-4, 1).root)]) == 2
    assert "name two or more" in capsys.readouterr().err

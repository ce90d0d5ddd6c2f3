"""Trackers that cannot be used are refused with one line and exit code 2, before anything starts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.launch.cli import main
from realsys.launch.trackers import check

MODULE = """
from realsys.telemetry.trackers.base import Tracker

class Good(Tracker):
    def __init__(self, run, unit="s"):
        super().__init__(run)

    def log(self, point):
        pass

class NeedsPackage(Good):
    package = "no_such_package_of_a_tracker"

class WithoutLog(Tracker):
    pass

class NoTracker:
    def log(self, point):
        pass
"""
#: settings -> part of the line
BAD = {
    "telemetry.trackers=[file,file]": "names 'file' twice",
    "telemetry.trackers=[tensorbord]": "use one of file, mlflow, tensorboard, trackio, wandb",
    "telemetry.trackers=[own_tracker:WithoutLog]": "lacks log",
    "telemetry.trackers=[own_tracker:NoTracker]": "must derive from",
    "telemetry.trackers=[own_tracker:NeedsPackage]": "pip install 'no_such_package_of_a_tracker'",
    "+telemetry.tracker_args.wandb.project=x": "names 'wandb', which is not in telemetry.trackers",
    "+telemetry.tracker_args.file.path=x": "do not fit file",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_tracker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("own_tracker", None)


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    code = main(["run", "experiment=arith", f"fileroot={folder / 'runs'}", *overrides])
    assert code == 2 and not (folder / "runs").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("setting", BAD)
def test_bad_tracker_is_one_line(setting: str, modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(modules, capsys, setting)
    assert "telemetry.tracker" in line and BAD[setting] in line


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_missing_package_names_its_installation(
    name: str, modules: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda package: None)
    assert f"pip install 'realsys[{name}]'" in refusal(modules, capsys, f"telemetry.trackers=[file,{name}]")
    assert name not in sys.modules


def test_own_tracker_with_arguments_is_accepted(modules: Path) -> None:
    config = compose(["experiment=arith", 'telemetry.trackers=["own_tracker:Good"]'])
    arguments = {"own_tracker:Good": {"unit": "ms"}}
    telemetry = config.telemetry.model_copy(update={"tracker_args": arguments})
    check.check_trackers(config.model_copy(update={"telemetry": telemetry}))

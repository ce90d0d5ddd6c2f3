"""Trackers that cannot be used are refused with one line and exit code 2, before anything starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.launch.cli import main
from realsys.observe.trackers import link
from tests.support.data.few_rows import FEW_ROWS

MODULE = """
from realsys.observe.trackers.contract import Tracker

class Good(Tracker):
    def __init__(self, run, unit="s"):
        super().__init__(run)

    def log(self, point):
        pass

class NeedsPackage(Good):
    package = "no_such_package_of_a_tracker"

class Keyless(Good):
    @classmethod
    def problem(cls, arguments):
        return "has no key"

class Careless(Good):
    @classmethod
    def problem(cls, arguments):
        return 1 / 0

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
    "+telemetry.tracker_args.file.path=x": "telemetry.tracker_args={'path': 'x'}: do not fit file",
    "telemetry.trackers=[own_tracker:Keyless]": "telemetry.trackers='own_tracker:Keyless': has no key",
    "telemetry.trackers=[own_tracker:Careless]": "cannot be checked: ZeroDivisionError",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_tracker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("own_tracker", None)


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    code = main(["run", "experiment=arith", *FEW_ROWS, f"fileroot={folder / 'runs'}", *overrides])
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
    monkeypatch.setattr(link, "find_spec", lambda package: None)
    assert f"pip install 'realsys[{name}]'" in refusal(modules, capsys, f"telemetry.trackers=[file,{name}]")
    assert name not in sys.modules


@pytest.fixture
def libraries(modules: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for W&B and trackio, whose sources are read; an import of them fails."""
    signatures = {
        "wandb/sdk/wandb_init.py": "project, mode, settings, id, resume",
        "trackio/__init__.py": "project, name",
    }
    for path, names in signatures.items():
        (modules / path).parent.mkdir(parents=True)
        (modules / path).write_text(f"def init({names}): ...\nraise ImportError('it was imported')\n")
    (modules / "wandb" / "__init__.py").write_text("raise ImportError('it was imported')")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(modules / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(modules))
    for library in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    return modules


def test_missing_key_of_wandb_is_one_line(libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(libraries, capsys, "telemetry.trackers=[file,wandb]")
    assert "telemetry.trackers='wandb': W&B has no API key" in line
    assert all(remedy in line for remedy in ("wandb login", "WANDB_API_KEY", "wandb.mode=offline"))


@pytest.mark.parametrize(
    ("name", "argument", "problem"),
    [
        ("wandb", "projct", "no argument 'projct': wandb.init takes mode, project, settings"),
        ("wandb", "id", "belongs to the trial"),
        ("trackio", "spce_id", "no argument 'spce_id': trackio.init takes project"),
        ("trackio", "name", "belongs to the trial"),
    ],
)
def test_unknown_argument_is_one_line(
    libraries: Path, capsys: pytest.CaptureFixture[str], name: str, argument: str, problem: str
) -> None:
    overrides = [f"telemetry.trackers=[{name}]", f"+telemetry.tracker_args.{name}.{argument}=x"]
    assert problem in refusal(libraries, capsys, *overrides)


def test_own_tracker_with_arguments_is_accepted(modules: Path) -> None:
    config = compose(["experiment=arith", 'telemetry.trackers=["own_tracker:Good"]'])
    arguments = {"own_tracker:Good": {"unit": "ms"}}
    telemetry = config.telemetry.model_copy(update={"tracker_args": arguments})
    link.check_trackers(config.model_copy(update={"telemetry": telemetry}))

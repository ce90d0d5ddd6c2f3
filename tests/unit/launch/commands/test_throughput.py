"""realsys plan: predictions from the folder of a trial, as JSON and as a table."""

import json
import shutil
from pathlib import Path

import pytest

from realsys.errors import ConfigError
from realsys.lab import plan
from realsys.lab.planner.cost_fit import fit
from realsys.lab.planner.parameters import Fit
from realsys.launch.cli import main
from tests.support.planner.recordings import COSTS, write_trial


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "trial"
    write_trial(folder, COSTS)
    return folder


@pytest.fixture(autouse=True)
def one_fit(monkeypatch):
    """Fit each folder once: a fit takes seconds."""
    monkeypatch.setattr(plan, "fit", fit_once)


def fit_once(recording, cores, progress):
    key = (recording.folder, cores)
    if key not in _fits:
        _fits[key] = fit(recording, cores, progress)
    return _fits[key]


_fits: dict[tuple[Path, float], Fit] = {}


def test_plan_predicts_what_is_tried(trial, capsys):
    command = ["plan", "--from", str(trial), "--cores", "0", "--devices", "2", "--json"]
    assert main([*command, "--try", "asynchronous.max_staleness=0 train.batch_groups=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == "allocation=serve.d1+d1"
    split, tried = found["splits"][0], found["others"][0]
    assert split["steps_per_h"]["low"] < split["steps_per_h"]["mid"] < split["steps_per_h"]["high"]
    assert tried["tokens_per_s"]["mid"] < split["tokens_per_s"]["mid"]  # nothing overlaps


def test_plan_shows_a_table(trial, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tried = "train.lora.targets=[qkv]"  # a list, not the markup of a terminal
    assert main(["plan", "train.batch_groups=4", "--from", str(trial), "--cores", "0", "--try", tried]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("recommended: allocation=serve.d1+d1")
    assert any(line.startswith(tried) for line in lines)
    assert max(map(len, lines)) <= 80


def test_recorded_run_is_shown_before_the_fit(
    trial: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first simulated row may take minutes on a busy machine."""
    monkeypatch.setattr(plan, "fit", lambda *_: _stop("fit"))
    assert main(["plan", "--from", str(trial)]) == 2
    head, recorded = capsys.readouterr().out.splitlines()[-2:]
    assert head.startswith("setting ") and recorded.startswith("as recorded ") and recorded.endswith("%")


@pytest.mark.parametrize("words", [["--cores", "nan"], ["--cores", "-1"], ["--devices", "-3"]])
def test_bad_machine_is_refused(words, trial, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--from", str(trial), *words])
    assert ended.value.code == 2 and "0 or more" in capsys.readouterr().err


def test_recording_on_gpus_shares_no_cores(trial, tmp_path, capsys, monkeypatch):
    """The plan may be made on a machine without GPUs: its cores are not those that the recorded run shared."""
    folder = tmp_path / "gpus"
    shutil.copytree(trial, folder)
    steps = folder / "steps.jsonl"
    records = [json.loads(line) | {"gpu": {"utilisation": 0.5}} for line in steps.read_bytes().splitlines()]
    steps.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    monkeypatch.setattr(plan, "split_variants", lambda config, devices, cores: _stop(f"{devices} {cores}"))
    assert main(["plan", "--from", str(folder)]) == 2
    assert "2 0.0" in capsys.readouterr().err


def _stop(seen):
    raise ConfigError("test", seen, "is what the command chose")


def test_plan_refuses_one_device(trial, capsys):
    assert main(["plan", "--from", str(trial), "--devices", "1"]) == 2
    assert "--devices=1" in capsys.readouterr().err


def test_plan_names_a_folder_without_a_trial(tmp_path, capsys):
    assert main(["plan", "--from", str(tmp_path)]) == 2
    assert "is not the folder of a trial" in capsys.readouterr().err

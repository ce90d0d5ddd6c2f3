"""`realsys compare`, `realsys export` and `realsys simulate`."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file

from realsys.config.compose import compose
from realsys.config.fields import replaced
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.manager.decisions import ManagerState
from realsys.observe import totals
from realsys.weights.disk.plain_folders import adopt
from tests.support.run_logs import run_records, train_record, write_log


def made(root, name, lr, steps):
    paths = TrialPaths(root / "math" / name)
    paths.root.mkdir(parents=True)
    write_config(replaced(Config(trial=name), ["train", "optimizer", "lr"], lr), paths.config)
    write_log(paths, run_records()[: 5 + steps])
    return paths


def test_comparison_has_settings_numbers_and_curves(tmp_path, capsys):
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


def test_field_that_an_older_build_lacks_is_empty(tmp_path, capsys):
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    settings = json.loads(first.config.read_text())
    del settings["telemetry"]
    first.config.write_text(json.dumps(settings))
    assert main(["compare", str(first.root), str(second.root)]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("telemetry")]
    assert len(row.split("  ")) > 2 and row.endswith("…")


def test_field_that_has_another_name_now_is_one_row(tmp_path, capsys):
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    settings = json.loads(first.config.read_text())
    settings["asynchronous"]["max_head_offpolicyness"] = 2 + settings["asynchronous"].pop("max_staleness")
    first.config.write_text(json.dumps(settings))
    assert main(["compare", str(first.root), str(second.root)]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("asynchronous")]
    assert row == ["asynchronous.max_staleness", "6", "4"]


def test_equal_columns_are_equal_steps_in_long_runs(tmp_path, capsys, monkeypatch):
    """A long curve has one point for several steps."""
    monkeypatch.setattr(totals, "CURVE_POINTS", 40)
    trials = [made(tmp_path, name, 1e-4, 0) for name in "ab"]
    for paths, steps in zip(trials, (40, 80), strict=True):
        write_log(paths, [train_record(step, accuracy=0.5) for step in range(1, steps + 1)])
    assert main(["compare", *(str(paths.root) for paths in trials)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("accuracy, 0.5 to 0.75")
    assert [len(line.split()[1]) for line in lines[place + 1 : place + 3]] == [20, 40]


def test_config_that_is_no_object_is_one_line(tmp_path, capsys):
    first, second = made(tmp_path, "a", 1e-4, 1), made(tmp_path, "b", 1e-4, 1)
    second.config.write_text("[]")
    assert main(["compare", str(first.root), str(second.root)]) == 2
    assert "must contain a JSON object" in capsys.readouterr().err


def test_one_trial_is_not_a_comparison(tmp_path, capsys):
    assert main(["compare", str(made(tmp_path, "a", 1e-4, 1).root)]) == 2
    assert "name two or more" in capsys.readouterr().err


# ---- `realsys export`: the weights of a step as a plain folder


@pytest.fixture
def trial(tmp_path):
    """A trial with versions 3 and 4 of its weights."""
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(), paths.config)
    paths.lock.touch()
    for version in (3, 4):
        model = tmp_path / f"hf{version}"
        model.mkdir()
        (model / "config.json").write_text("{}")
        save_file({"a": torch.full((2,), float(version))}, model / "model.safetensors")
        adopt(model, paths.weights(), version, "0001")
    return paths


@pytest.mark.parametrize(("words", "value"), [([], 4.0), (["--step", "3"], 3.0)])
def test_export_has_the_weights_of_the_step(trial, tmp_path, words, value):
    out = tmp_path / "new" / "model"
    assert main(["export", str(trial.root), str(out), *words]) == 0
    [file] = out.glob("*.safetensors")
    assert load_file(file)["a"].tolist() == [value] * 2 and (out / "config.json").is_file()


def test_printed_setting_names_the_new_folder(trial, tmp_path, capsys):
    """The folder has characters of the shell, of zsh's patterns and of hydra's lists."""
    out = tmp_path / "it's [1] model"
    assert main(["export", str(trial.root), str(out)]) == 0
    (setting,) = shlex.split(capsys.readouterr().out.partition("loads it, and ")[2])
    assert compose(["experiment=math", setting]).model.path == str(out)


def test_existing_folder_is_not_overwritten(trial, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["export", str(trial.root), str(tmp_path / "out")]) == 2
    assert "exists: name a new folder" in capsys.readouterr().err


# ---- `realsys simulate`: prints and writes the measurements; a broken invariant is an exit code


SMALL = ["train.batch_groups=2", "rollout.group_size=2", "sim.steps=3"]


def test_measurements_are_printed_and_written(tmp_path, capsys):
    assert main(["simulate", "pareto", *SMALL, "--seed", "3", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["seed"], written["steps"]) == (3, 3)
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    assert any("3 steps" in line for line in lines) and lines == [line.rstrip() for line in lines]


def test_broken_invariant_names_the_command(monkeypatch, capsys):
    monkeypatch.setattr(ManagerState, "refusal", lambda self: None)
    assert main(["simulate", "pareto", *SMALL]) == 1
    assert "to repeat it: realsys simulate pareto train.batch_groups=2" in capsys.readouterr().err


def test_unknown_scenario_is_bad_input(capsys):
    assert main(["simulate", "nothing"]) == 2
    assert "must be one of lognormal, pareto, faults" in capsys.readouterr().err

"""`realsys config`: the configuration of a run, without a start."""

import json

import pytest
import yaml

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_config_is_complete_and_starts_nothing(folder, capsys):
    assert main(["config", "experiment=arith", "train.total_steps=7"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["train"]["total_steps"] == 7 and found["allocation"] != "auto"
    assert found.keys() == Config.model_fields.keys()
    assert list(folder.iterdir()) == []


def test_diff_is_a_list_of_overrides(capsys):
    assert main(["config", "experiment=arith", "train.total_steps=7", "--diff"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train.total_steps=7" in lines and "data.kind=arith" in lines
    assert not [line for line in lines if line.startswith(("trial=", "fileroot="))]
    assert main(["config", *lines, "--diff"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("words", [["experiment=arith", "train.optimizer.beta2=0.95"], ["experiment=math", "seed=2"]])
def test_diff_gives_the_same_config_again(words, capsys):
    """A field may have its default where the experiment has another value; the default experiment is named, too."""
    command = ["config", "--json", "trial=t"]
    assert main([*command, *words]) == 0
    whole = capsys.readouterr().out
    assert main(["config", "--diff", *words]) == 0
    assert main([*command, *capsys.readouterr().out.splitlines()]) == 0
    assert capsys.readouterr().out == whole


def test_config_of_a_trial_with_changes(folder, capsys):
    paths = TrialPaths(folder / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(experiment="math", trial="t", seed=5), paths.config)
    assert main(["config", "math/t", "train.total_steps=7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seed"], found["train"]["total_steps"]) == (5, 7)


def test_bad_field_is_one_line(capsys):
    assert main(["config", "experiment=arith", "train.bach_groups=1"]) == 2
    assert "did you mean train.batch_groups?" in capsys.readouterr().err

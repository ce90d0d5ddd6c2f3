"""The model that `realsys eval` names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.evaluation_target import exported, find_target
from realsys.weights.disk.plain_folders import adopt, materialise, verify


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def trial(tmp_path: Path, model: Path) -> TrialPaths:
    """A trial with versions 3 and 4 of its weights, and an export of step 2."""
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(), paths.config)
    paths.lock.touch()
    for version in (3, 4):
        adopt(model, paths.weights(), version, "0001")
    materialise(adopt(model, tmp_path / "other", 2, "0001"), paths.root / "hf" / "step-2")
    return paths


def test_model_folder_is_taken_as_it_is(model):
    target = find_target(str(model), None)
    assert (target.model, target.step, target.trial) == (model, 0, None)
    assert exported(target) == model


def test_trial_without_model_gives_its_newest_weights(trial):
    target = find_target(str(trial.root), None)
    assert (target.step, target.form) == (4, "version")
    folder = exported(target)
    assert folder == trial.root / "eval" / "models" / "00000004"
    verify(folder, 4)


def test_trained_model_comes_before_newer_weights(trial):
    materialise(trial.weights() / "v00000003.0001", trial.final_model)
    target = find_target(str(trial.root), None)
    assert (target.model, target.step, target.form) == (trial.final_model, 3, "model")


def test_step_chooses_an_export(trial):
    target = find_target(str(trial.root), 2)
    assert target.model == trial.root / "hf" / "step-2" and target.form == "model"


def test_undone_version_is_never_taken(trial, model):
    """The trainer went back to step 2 and published version 3 again: version 4 is of weights that were undone."""
    adopt(model, trial.weights(), 3, "0002")
    assert find_target(str(trial.root), None).model.name == "v00000003.0002"


def test_export_of_an_undone_version_is_replaced(trial, model):
    old = exported(find_target(str(trial.root), 3))
    adopt(model, trial.weights(), 3, "0002")
    assert exported(find_target(str(trial.root), 3)) == old
    assert '"0002"' in (old / "MANIFEST.json").read_text()


def test_trial_is_found_by_its_name(trial, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_target("math/t", None).trial == trial


def test_unusable_targets_are_one_line(trial, model, tmp_path):
    (tmp_path / "empty").mkdir()
    for text, step, problem in (
        (str(tmp_path / "none"), None, "is not a directory"),
        (str(tmp_path / "empty"), None, r"has neither \*.safetensors nor the files of a trial"),
        (str(model), 3, "is a model folder, which has one state only"),
        (str(trial.root), 7, "has the weights of these steps only: 2, 3, 4; set checkpoint.hf_every_steps"),
    ):
        with pytest.raises(ConfigError, match=problem) as raised:
            find_target(text, step)
        assert "\n" not in str(raised.value)

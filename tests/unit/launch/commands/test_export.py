"""`realsys export`: the weights of a step as a plain folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from realsys.config.compose import compose
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.weights.disk.plain_folders import adopt


@pytest.fixture
def trial(tmp_path: Path) -> TrialPaths:
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
def test_export_has_the_weights_of_the_step(trial: TrialPaths, tmp_path: Path, words: list[str], value: float) -> None:
    out = tmp_path / "new" / "model"
    assert main(["export", str(trial.root), str(out), *words]) == 0
    [file] = out.glob("*.safetensors")
    assert load_file(file)["a"].tolist() == [value] * 2 and (out / "config.json").is_file()


def test_printed_setting_names_the_new_folder(
    trial: TrialPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has characters of the shell, of zsh's patterns and of hydra's lists."""
    out = tmp_path / "it's [1] model"
    assert main(["export", str(trial.root), str(out)]) == 0
    (setting,) = shlex.split(capsys.readouterr().out.partition("loads it, and ")[2])
    assert compose(["experiment=math", setting]).model.path == str(out)


def test_step_without_weights_is_refused(trial: TrialPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trial.root), str(tmp_path / "out"), "--step", "2"]) == 2
    assert "has the weights of these steps only: 3, 4; set checkpoint.hf_every_steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_not_overwritten(
    trial: TrialPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["export", str(trial.root), str(tmp_path / "out")]) == 2
    assert "exists: name a new folder" in capsys.readouterr().err

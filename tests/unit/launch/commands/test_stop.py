"""`realsys stop` and the other commands that take the folder of a trial."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.launch.words import own_command


@pytest.mark.parametrize("command", [["stop"], ["status"], ["logs", "--trial-dir"]])
@pytest.mark.parametrize("folder", ["missing", "."])
def test_folder_without_a_trial_is_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, folder]) == 2
    line = f"realsys: config: TRIAL_DIR={folder!r}: is not the folder of a trial: correct the path\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("command", ["audit", "replay", "regrade", "samples", "export", "gc"])
def test_every_command_takes_experiment_and_trial(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial under runs/ is found: what a command lacks then is another thing."""
    monkeypatch.chdir(tmp_path)
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    paths.lock.touch()
    main([command, "math/t", *(["out"] if command == "export" else [])])
    said = "".join(capsys.readouterr())
    assert str(paths.root) in said or said == "nothing is left over\n"


@pytest.mark.parametrize(
    "words", [["stop", "--wait", "nan"], ["node-agent", "--trial-dir", "x", "--wait", "-1"], ["logs", "-n", "-5"]]
)
def test_time_and_count_have_bounds(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and ": must be a" in capsys.readouterr().err


def test_printed_command_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has a space, and realsys may not be on the PATH."""
    paths = TrialPaths(tmp_path / "my runs" / "math" / "t")
    (paths.checkpoints / "step-00000003.tmp").mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    assert main(["gc", str(paths.root)]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("to remove them: ")[2]
    assert shlex.split(command) == [*own_command(), "gc", str(paths.root), "--yes"]


def test_stop_of_an_ended_trial_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock").touch()
    assert main(["stop", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} does not run\n"

"""`realsys stop` and the other commands that take the folder of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.launch.cli import main


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


def test_stop_of_an_ended_trial_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock").touch()
    assert main(["stop", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} does not run\n"

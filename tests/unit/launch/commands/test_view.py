"""`realsys view`: bad input, and the status of a trial that has ended."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from realsys.config.paths import read_config
from realsys.launch.cli import main
from realsys.launch.commands.view import ManagerStatus
from tests.support.view.shown_trial import sample_trial


def test_bad_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sample_trial(tmp_path)
    assert main(["view", str(paths.root), "--port", "65536"]) == 2
    assert "must be 0 (any free port) to 65535" in capsys.readouterr().err


def test_busy_port_is_refused_before_an_address_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sample_trial(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(paths.root), "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"--port={port}: cannot bind 127.0.0.1:{port}" in err


def test_name_of_a_trial_is_corrected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_trial(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["view", "demo/shwon"]) == 2
    assert "is not the folder of a trial: did you mean demo/shown?" in capsys.readouterr().err


def test_folder_must_be_a_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "is not the folder of a trial" in capsys.readouterr().err


def test_ended_trial_has_no_manager(tmp_path: Path) -> None:
    """It is not asked for: opening the name store of an ended trial would write into its folder."""
    paths = sample_trial(tmp_path)
    status = ManagerStatus(read_config(paths.config), paths)
    before = sorted(paths.root.rglob("*"))
    assert asyncio.run(status.read()) is None and not status.is_running()
    status.close()
    assert sorted(paths.root.rglob("*")) == before

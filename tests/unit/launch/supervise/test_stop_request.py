"""The file with which `realsys stop` asks a launcher to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from realsys.launch.supervise import stop_request
from realsys.launch.supervise.stop_request import ask_to_stop, take_request, watch_requests


def test_request_is_taken_once(tmp_path: Path) -> None:
    ask_to_stop(tmp_path / "stop")
    assert "@" in take_request(tmp_path / "stop")
    assert take_request(tmp_path / "stop") == "" and not list(tmp_path.iterdir())


def test_launcher_hears_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_request, "_LOOK_S", 0.01)

    async def body() -> str:
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(watch_requests(tmp_path / "stop", heard.set_result))
        ask_to_stop(tmp_path / "stop")
        try:
            return await asyncio.wait_for(heard, 60)
        finally:
            watching.cancel()

    assert "@" in asyncio.run(body())

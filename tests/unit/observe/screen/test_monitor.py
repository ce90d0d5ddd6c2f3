"""Monitor: finds the manager, asks for its status, and watches the disk."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.observe.screen import progress as monitoring
from realsys.observe.screen.progress import Monitor, TrialProgress, ask_once
from realsys.observe.step_log import StepTail
from tests.support.run_logs import train_record, write_log


def test_manager_is_found_and_asked(tmp_path: Path) -> None:
    config, paths = Config(fileroot=str(tmp_path)), TrialPaths(tmp_path)

    async def body() -> TrialProgress:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"version": 7})

        app = web.Application()
        app.router.add_get("/status", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        store = make_name_store(config, paths)
        store.add(trial_names(config).gserver_manager, f"http://{host}:{port}")
        store.close()
        progress = TrialProgress()
        await ask_once(config, paths, progress)
        await runner.cleanup()
        assert progress.status == {"version": 7}
        await ask_once(config, paths, progress)  # it is gone now
        return progress

    progress = asyncio.run(body())
    assert progress.status == {"version": 7} and progress.address is None


def test_full_disk_is_named_once_while_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within two looks, not only when a process dies of it."""
    config, paths = Config(fileroot=str(tmp_path)), TrialPaths(tmp_path)
    monkeypatch.setattr(monitoring, "_REFRESH_S", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))

    async def body() -> list[str]:
        notes, looks, done = [], itertools.count(), asyncio.Event()

        def refresh(*_: object) -> None:
            if next(looks) == 3:
                done.set()

        screen = SimpleNamespace(refresh=refresh, note=notes.append)
        task = asyncio.create_task(Monitor(config, paths, TrialProgress(), screen, StepTail(paths.steps)).run())
        async with asyncio.timeout(60):
            await done.wait()
        task.cancel()
        await asyncio.wait([task])
        return notes

    assert asyncio.run(body()) == [f"No space left on device: {tmp_path}: free space on this disk"]


def test_warnings_go_to_the_given_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher writes them to the events of the trial, too; a reader of the trial shows those."""
    config, paths = Config(fileroot=str(tmp_path)), TrialPaths(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    shown: list[str] = []
    noted: list[str] = []
    screen = SimpleNamespace(refresh=lambda *_: None, note=shown.append)
    Monitor(config, paths, TrialProgress(), screen, StepTail(paths.steps), noted.append).check_disk()
    assert len(noted) == 1 and shown == []


def test_policy_that_drifts_is_noted(tmp_path: Path) -> None:
    config, paths, notes = Config(fileroot=str(tmp_path)), TrialPaths(tmp_path), list[str]()
    records = [train_record(step, stats={"entropy_mean": 0.4 if step < 9 else 0.01}) for step in range(1, 11)]
    write_log(paths, records)
    screen = SimpleNamespace(refresh=lambda *_: None)
    Monitor(config, paths, TrialProgress(), screen, StepTail(paths.steps), notes.append).read_steps()
    assert len(notes) == 1 and notes[0].startswith("step 9: entropy fell to 0.01")


def test_address_of_the_page_has_its_key_on_a_terminal() -> None:
    progress = TrialProgress(address="http://127.0.0.1:8000")
    assert progress.page == "http://127.0.0.1:8000/"
    progress.key = "secret"
    assert progress.page == "http://127.0.0.1:8000/#key=secret"

"""curves.png while a run lasts: drawn by another process, which ends with the run."""

import asyncio
import contextlib
import os

import psutil
import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.conclude import draw
from realsys.observe import curves
from realsys.observe.curves import draw_while_running
from tests.support.polling import poll
from tests.support.run_logs import run_records, write_log

pytestmark = pytest.mark.processes

BOUND_S = 120.0


@pytest.fixture
def paths(tmp_path):
    write_config(Config(), tmp_path / "config.json")
    return TrialPaths(tmp_path)


def children():
    return {child.pid for child in psutil.Process().children()}


def test_curves_are_drawn_again_when_the_log_has_grown(paths, monkeypatch):
    """At the priority of the test: at the lowest one, a busy machine would let it wait for ever."""
    program = f"import os, sys\nos.nice = int\nfrom {curves.MODULE} import main\nsys.exit(main(sys.argv[1:]))\n"
    (paths.root / "draws.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(paths.root), prepend=os.pathsep)
    monkeypatch.setattr(curves, "MODULE", "draws")
    monkeypatch.setattr(curves, "_PAUSE", 0.0)
    write_log(paths, run_records()[:6])

    async def body():
        task = asyncio.create_task(draw_while_running(paths, 0.01))
        await asyncio.to_thread(poll, paths.curves.exists, "curves.png", BOUND_S)
        first = paths.curves.stat().st_ino
        write_log(paths, run_records())
        await asyncio.to_thread(poll, lambda: paths.curves.stat().st_ino != first, "new curves.png", BOUND_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert paths.curves.read_bytes().startswith(b"\x89PNG") and not list(paths.root.glob("*.tmp"))


def test_drawing_ends_with_the_run(paths, monkeypatch):
    """A process that hangs is killed. Before the first train step none is started."""
    (paths.root / "hangs.py").write_text("import time\ntime.sleep(1e6)\n")
    monkeypatch.setenv("PYTHONPATH", str(paths.root), prepend=os.pathsep)
    monkeypatch.setattr(curves, "MODULE", "hangs")
    before = children()
    write_log(paths, run_records()[:5])

    async def body():
        task = asyncio.create_task(draw_while_running(paths, 0.01))
        await asyncio.sleep(0.1)
        assert children() == before
        write_log(paths, run_records())
        await asyncio.to_thread(poll, lambda: children() != before, "a process", BOUND_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert children() == before


@pytest.mark.parametrize("every_s", [0.0, 300.0])
def test_zero_means_no_picture(paths, every_s):
    """Neither while the run lasts nor at its end."""
    write_log(paths, run_records())
    if not every_s:
        asyncio.run(asyncio.wait_for(draw_while_running(paths, every_s), BOUND_S))
    draw(Config.model_validate({"telemetry": {"curves_every_s": every_s}}), paths, steps=5)
    assert paths.curves.exists() is bool(every_s)

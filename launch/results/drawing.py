"""Draws curves.png while a run lasts, in a process at the lowest priority.

    wait every_s ──> draw, if the step log has grown ──> wait at least 200 times as long as that took ──> ...

So the drawing takes at most 0.5 % of one core, however long the log is. Nothing here ends or delays a run.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from realsys.cluster.child_process import ChildProcess
from realsys.config.paths import TrialPaths
from realsys.telemetry.steps import StepTail

_PAUSE = 200.0  # times the duration of a drawing
_LONGEST_S = 120.0  # bound on one drawing
MODULE = "realsys.launch.results.curves"


async def draw_while_running(paths: TrialPaths, every_s: float) -> None:
    """Draw about every ``every_s`` seconds until cancelled; never, if that is 0."""
    if not every_s:
        return
    pause_s, drawn = every_s, 0
    while True:
        await asyncio.sleep(pause_s)
        size = _size(paths.steps)
        if size == drawn or not _has_trained(paths.steps):
            continue
        began = time.monotonic()
        await _draw(paths)
        drawn, pause_s = size, max(every_s, _PAUSE * (time.monotonic() - began))


async def _draw(paths: TrialPaths) -> None:
    """Run the process. A drawing that fails is left out: the one at the end of the run reports its error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        child = ChildProcess([sys.executable, "-P", "-m", MODULE, str(paths.root)], env, subprocess.DEVNULL)
    except OSError:
        return
    try:
        await child.exits_within(_LONGEST_S)
    finally:
        child.kill()
        await asyncio.shield(child.exits_within(None))
        child.reap()


def _has_trained(steps: Path) -> bool:
    """Return True if the step log has a train step. Reads it up to the first one."""
    return any(record["kind"] == "train" for record in StepTail(steps).records())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

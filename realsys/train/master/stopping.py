"""The stop of a MasterWorker while a step runs: the step is abandoned, or finished if it has begun to update weights.

    stop ──> pause_step (all workers) ──> decide ──> settle_step ──> the calls end as abandoned ──> checkpoint
                                             └ a worker is updating: the step runs to its end ────┘

Consumes: the request to stop. Waits for: the workers' positions in the step. Produces: the file
``stopping``, whose first line tells the user what the stop waits for. It changes as long as the step moves
on; together with the bytes of unfinished files it is the *progress* of a stop (``progress``). A stop lasts
as long as its progress does, and ends ``STOP_PROGRESS_S`` after the last change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from realsys.cluster.aio import run_beside
from realsys.config.paths import TrialPaths
from realsys.train.step_gate import GateState, SettleRequest, StepAbandoned, decide

log = logging.getLogger(__name__)

Result = TypeVar("Result")
#: A stop waits for the last checkpoint as long as there is progress: a micro-batch, or bytes of a checkpoint. After
#: these seconds without progress it gives up, because a rank that hangs looks the same as one that computes.
STOP_PROGRESS_S = 20.0
_LOOK_S = 0.5  # seconds between two questions how far the step is
_UNFINISHED = ("checkpoints/*.tmp/*", "weights/*/*.tmp/*")


class StopCalls(Protocol):
    """Calls of ``ModelWorkers`` that are used here. Each goes to every worker, which answers while it computes."""

    def pause_step(self) -> Awaitable[list[GateState]]: ...
    def settle_step(self, payload: SettleRequest) -> Awaitable[list[GateState]]: ...


class Stopping:
    """Runs the steps of a loop so that a stop can abandon them. ``path``: the file ``stopping``."""

    def __init__(self, stop: asyncio.Event, workers: StopCalls, path: Path) -> None:
        self._stop = stop
        self._workers = workers
        self._path = path

    async def run(self, step: int, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of ``work``, the calls of ``step``; None if a stop abandoned them.

        The state of training is then that of step ``step - 1``.
        """
        try:
            return await run_beside(work, self._settle(step))
        except StepAbandoned as abandoned:
            log.info("%s", abandoned)
            return None

    async def _settle(self, step: int) -> None:
        await self._stop.wait()
        decision = decide(await self._workers.pause_step(), step - 1)
        if decision.abandon:
            text = f"stopping: step {step} is not finished, it will be trained again; saving step {step - 1}"
        else:
            text = f"stopping: step {step} has begun to update the weights; it is finished and saved"
        log.info("%s", text)
        while True:  # until ``run_beside`` cancels it
            states = await self._workers.settle_step(decision)
            try:
                self._path.write_text(
                    f"{text}\n{[sorted(state.passed.items()) for state in states]}\n", encoding="utf-8"
                )
            except OSError as error:  # a full disk: the stop continues, without a sign of its progress
                log.warning("cannot write %s: %s", self._path, error.strerror)
            await asyncio.sleep(_LOOK_S)


def progress(paths: TrialPaths) -> tuple[str, int]:
    """Return what a stop has done so far: the text of ``stopping``, and the bytes of unfinished files."""
    text, size = "", 0
    with contextlib.suppress(OSError):
        text = paths.stopping.read_text(encoding="utf-8")
    for pattern in _UNFINISHED:
        for file in paths.root.glob(pattern):
            with contextlib.suppress(OSError):  # it was committed just now
                size += file.stat().st_size
    return text, size

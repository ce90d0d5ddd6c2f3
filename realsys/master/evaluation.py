"""Held-out accuracy, sampled through the servers like any rollout."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from realsys.admission.messages import EvaluateRequest, EvaluationReply
from realsys.errors import StuckError, WaitTimeout
from realsys.rollout.manager_client import ManagerClient

POLL_S = 0.2


class Evaluations:
    """Asks the manager for evaluations and waits for them, in the foreground or beside training."""

    def __init__(self, manager: ManagerClient, *, seed: int, timeout_s: float) -> None:
        self._manager, self._seed, self._timeout_s = manager, seed, timeout_s
        self._running: dict[str, tuple[int, float]] = {}  # eval_id -> (step, started)

    async def start(self, eval_id: str, problems: int, step: int) -> None:
        await self._manager.evaluate(EvaluateRequest(eval_id, "eval", problems, self._seed))
        self._running[eval_id] = (step, time.monotonic())

    async def run(self, eval_id: str, problems: int, step: int) -> dict[str, Any]:
        """Start one and wait for it. Raises WaitTimeout with how far it got.

        The manager knows it by its step, too: a run that was done and trains on has another one "after".
        """
        asked = f"{eval_id}-{step}"
        await self.start(asked, problems, step)
        while True:
            if records := await self.finished(asked):
                return records[0] | {"eval_id": eval_id}
            await asyncio.sleep(POLL_S)

    async def rest(self) -> list[dict[str, Any]]:
        """Wait for all that were started beside training. Raises WaitTimeout with how far they got."""
        records = []
        while self._running:
            records += await self.finished()
            if self._running:
                await asyncio.sleep(POLL_S)
        return records

    async def finished(self, *wanted: str) -> list[dict[str, Any]]:
        """Step-log records of the evaluations that are done by now, each once; of all running ones by default."""
        records = []
        for eval_id in wanted or list(self._running):
            step, started = self._running[eval_id]
            seconds = time.monotonic() - started
            state = await self._manager.evaluation(eval_id)
            if state.done + state.failed >= state.total:
                del self._running[eval_id]
                records.append(_record(eval_id, step, seconds, state))
            elif seconds > self._timeout_s:
                raise WaitTimeout(
                    f"master_worker: evaluation {eval_id!r} has {state.done} of {state.total} answers after "
                    f"{seconds:.0f} s ({state.failed} failed); see the logs of the rollout workers"
                )
        return records


def _record(eval_id: str, step: int, seconds: float, state: EvaluationReply) -> dict[str, Any]:
    if not state.done:
        raise StuckError(f"master_worker: evaluation {eval_id!r}: all {state.failed} rollouts failed")
    return {
        "kind": "eval",
        "time": time.time(),
        "eval_id": eval_id,
        "step": step,
        "problems": state.done,
        "failed": state.failed,
        "accuracy": state.accuracy,
        "length_mean": state.length_mean,
        "version_min": state.version_min,
        "version_max": state.version_max,
        "seconds": seconds,
    }

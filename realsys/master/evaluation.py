"""Held-out accuracy, sampled through the servers like any rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realsys.errors import StuckError, WaitTimeout
from realsys.manager.messages import EvaluateRequest, EvaluationReply
from realsys.rollout.manager_client import ManagerClient

POLL_S = 0.2
LOOK_S = 5.0  # between two looks at the manager's status

Mend = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Running:
    """``step``: that it was due at; ``asked_at``: that of the weights it was asked for with; ``started``: monotonic."""

    step: int
    asked_at: int
    started: float


class Evaluations:
    """Asks the manager for evaluations and waits for them, in the foreground or beside training.

    ``trainer_incarnation``: incarnation of this training side; one that was replaced gets Fenced for asking.
    """

    def __init__(
        self, manager: ManagerClient, *, trainer_incarnation: str, seed: int, timeout_s: float, mend: Mend
    ) -> None:
        """``mend``: called with the manager's status now and then while one is waited for."""
        self._manager, self._trainer_incarnation, self._seed, self._timeout_s = (
            manager,
            trainer_incarnation,
            seed,
            timeout_s,
        )
        self._mend, self._looked = mend, time.monotonic()
        self._running: dict[str, _Running] = {}  # by eval_id

    async def start(self, eval_id: str, problems: int, step: int, asked_at: int | None = None) -> None:
        """``asked_at``: the step done, where the evaluation was due at an earlier ``step`` and is asked for again."""
        await self._manager.evaluate(EvaluateRequest(eval_id, "eval", problems, self._seed, self._trainer_incarnation))
        self._running[eval_id] = _Running(step, step if asked_at is None else asked_at, time.monotonic())

    async def run(self, eval_id: str, problems: int, step: int) -> dict[str, Any]:
        """Start one and wait for it. Raises WaitTimeout with how far it got.

        The manager knows it by its step, too: a run that was done and trains on has another one "after".
        """
        asked = f"{eval_id}-{step}"
        await self.start(asked, problems, step)
        while True:
            if records := await self.finished(asked):
                return records[0] | {"eval_id": eval_id}
            await self._pause()

    async def rest(self) -> list[dict[str, Any]]:
        """Wait for all that were started beside training. Raises WaitTimeout with how far they got."""
        records = []
        while self._running:
            records += await self.finished()
            if self._running:
                await self._pause()
        return records

    async def _pause(self) -> None:
        await asyncio.sleep(POLL_S)
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            await self._mend(await self._manager.status())

    async def finished(self, *wanted: str) -> list[dict[str, Any]]:
        """Step-log records of the evaluations that are done by now, each once; of all running ones by default."""
        records = []
        for eval_id in wanted or list(self._running):
            running = self._running[eval_id]
            seconds = time.monotonic() - running.started
            state = await self._manager.evaluation(eval_id)
            if state.done + state.failed >= state.total:
                del self._running[eval_id]
                records.append(_record(eval_id, running, seconds, state))
            elif seconds > self._timeout_s:
                raise WaitTimeout(
                    f"master_worker: evaluation {eval_id!r} has {state.done} of {state.total} answers after "
                    f"{seconds:.0f} s ({state.failed} failed); see the logs of the rollout workers"
                )
        return records


def _record(eval_id: str, running: _Running, seconds: float, state: EvaluationReply) -> dict[str, Any]:
    if not state.done:
        raise StuckError(f"master_worker: evaluation {eval_id!r}: all {state.failed} rollouts failed")
    return {
        "kind": "eval",
        "time": time.time(),
        "eval_id": eval_id,
        # Of the weights that answered: asked for again, those of its own step may be gone.
        "step": min(running.asked_at, max(running.step, state.version_min)),
        "problems": state.done,
        "failed": state.failed,
        "accuracy": state.accuracy,
        "reward_mean": state.reward_mean,
        "length_mean": state.length_mean,
        "version_min": state.version_min,
        "version_max": state.version_max,
        "metrics": state.metrics,
        "seconds": seconds,
    }

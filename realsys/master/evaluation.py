"""Evaluations: held-out accuracy, sampled through the same servers and RolloutWorkers as training."""

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
STATUS_INTERVAL_S = 5.0  # between two reads of the manager's status

#: Repairs the newest version if the manager's status says that no server can load it.
Repair = Callable[[Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A requested evaluation.

    step          the step after which it was due
    requested_at  the step of the weights that were the newest when it was requested
    started       monotonic seconds
    """

    step: int
    requested_at: int
    started: float


class Evaluations:
    """Requests evaluations from the manager and waits for them: for one alone, or while training
    continues.

    ``trainer_incarnation``: incarnation of this training side. A request of one that was replaced
    raises Fenced.
    """

    def __init__(
        self, manager: ManagerClient, *, trainer_incarnation: str, seed: int, timeout_s: float, repair: Repair
    ) -> None:
        """``repair``: called with the manager's status every few seconds while an evaluation is
        awaited.
        """
        self._manager = manager
        self._trainer_incarnation = trainer_incarnation
        self._seed = seed
        self._timeout_s = timeout_s
        self._repair = repair
        self._status_read = time.monotonic()
        self._running: dict[str, _Running] = {}  # eval_id -> evaluation

    async def start(self, eval_id: str, problems: int, step: int, requested_at: int | None = None) -> None:
        """Request an evaluation of ``problems`` problems, due after ``step``; do not wait for it.

        ``requested_at``: the steps done, if the evaluation was due at an earlier ``step`` and is
        requested again.
        """
        await self._manager.evaluate(EvaluateRequest(eval_id, "eval", problems, self._seed, self._trainer_incarnation))
        self._running[eval_id] = _Running(step, step if requested_at is None else requested_at, time.monotonic())

    async def run(self, eval_id: str, problems: int, step: int) -> dict[str, Any]:
        """Request an evaluation and wait for it; return its step-log record.

        Raises WaitTimeout with its progress.
        """
        # The manager answers a known id with its old result. A run that is continued has another
        # "after", so the id that the manager sees has the step in it.
        requested = f"{eval_id}-{step}"
        await self.start(requested, problems, step)
        while True:
            if records := await self.finished(requested):
                return records[0] | {"eval_id": eval_id}
            await self._pause()

    async def finish_all(self) -> list[dict[str, Any]]:
        """Wait for all requested evaluations; return their records.

        Raises WaitTimeout with their progress.
        """
        records = []
        while self._running:
            records += await self.finished()
            if self._running:
                await self._pause()
        return records

    async def _pause(self) -> None:
        await asyncio.sleep(POLL_S)
        if time.monotonic() - self._status_read > STATUS_INTERVAL_S:
            self._status_read = time.monotonic()
            await self._repair(await self._manager.status())

    async def finished(self, *eval_ids: str) -> list[dict[str, Any]]:
        """Return the step-log records of those of ``eval_ids`` (default: all) that are done, each
        record once.

        Raises WaitTimeout for one that exceeds its time limit, StuckError if all its episodes
        failed.
        """
        records = []
        for eval_id in eval_ids or list(self._running):
            running = self._running[eval_id]
            seconds = time.monotonic() - running.started
            state = await self._manager.evaluation(eval_id)
            if state.done + state.failed >= state.total:
                del self._running[eval_id]
                records.append(_record(eval_id, running, seconds, state))
            elif seconds > self._timeout_s:
                raise WaitTimeout(
                    f"master_worker: evaluation {eval_id!r} has {state.done} of {state.total} completions after "
                    f"{seconds:.0f} s ({state.failed} failed); see the logs of the rollout workers"
                )
        return records


def _record(eval_id: str, running: _Running, seconds: float, state: EvaluationReply) -> dict[str, Any]:
    if not state.done:
        raise StuckError(
            f"master_worker: evaluation {eval_id!r}: all {state.failed} episodes failed: "
            "see the logs of the rollout workers"
        )
    return {
        "kind": "eval",
        "time": time.time(),
        "eval_id": eval_id,
        # The step of the weights that sampled: when an evaluation is requested again, those of its
        # own step may be superseded.
        "step": min(running.requested_at, max(running.step, state.version_min)),
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

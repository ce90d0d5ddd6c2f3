"""Bound on the time of an episode: `stuck-costs-itself`, an episode that does not end fails alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from realsys.errors import AgentError
from realsys.rollout.agents.base import Agent, Session
from realsys.rollout.task import Task
from realsys.types import Episode

log = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_S = 5.0  # a cancelled episode ends within this time, or is left behind
_left_behind: set[asyncio.Task[Any]] = set()  # tasks need a reference


class EpisodeTime:
    """Time of one episode: ``timeout_s`` for all its work together, from the start of the first."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end: float | None = None

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. Raises AgentError if the time is over before it ends.

        Work that catches its cancellation continues without its caller.
        """
        now = asyncio.get_running_loop().time()
        self._end = now + self._timeout_s if self._end is None else self._end
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task,), timeout=max(0.0, self._end - now))
            if task.done():
                return task.result()
        finally:
            await _cancel(task)
        raise AgentError(f"it did not end within rollout.agent_limits.episode_timeout_s={self._timeout_s:g}")


async def _cancel(task: asyncio.Task[Any]) -> None:
    if task.done():
        return
    task.cancel()
    _left_behind.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait((task,), timeout=_CANCEL_S)
    if not task.done():
        log.error("an episode continues after its cancellation: its run must not catch CancelledError")


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio would log that it was never retrieved


class Bounded:
    """A native agent whose episodes may take ``timeout_s`` each."""

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        self.agent = agent
        self._timeout_s = timeout_s

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode."""
        return await EpisodeTime(self._timeout_s).bound(self.agent.run(task, session))

    async def close(self) -> None:
        """Close the agent, if it has a ``close``."""
        close = getattr(self.agent, "close", None)
        if close is not None:
            await close()

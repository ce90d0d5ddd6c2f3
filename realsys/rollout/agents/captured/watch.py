"""Watch over async agents in the RolloutWorker: one that blocks the event loop fails alone.

    thread ──tick──> event loop ──answer──> thread
       └─ no answer for too long: SIGUSR2 ──> handler in the main thread ──AgentError──> inside of the agent's code

The handler raises only if the code of an agent is running: in its context, which the tasks that it starts inherit. Code
that holds the interpreter without running Python, such as a long matrix product, is interrupted when it returns.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextvars import ContextVar
from types import FrameType

from realsys.errors import AgentError

_TICKS = 10  # ticks in ``blocking_s``

in_agent: ContextVar[bool] = ContextVar("in_agent", default=False)  # True in the code of agents


class BlockedWatch:
    """Watch of the event loop that runs when it is started, in the main thread."""

    def __init__(self, blocking_s: float) -> None:
        self._blocking_s = blocking_s
        self._stop = threading.Event()
        self._missed = 0  # ticks without an answer; counted, because a suspended process has missed none
        self._before = signal.signal(signal.SIGUSR2, self._interrupt)
        self._thread = threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGUSR2, self._before)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.wait(self._blocking_s / _TICKS):
            self._missed += 1
            if self._missed > _TICKS:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            try:
                loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the event loop is closed
                return

    def _answer(self) -> None:
        self._missed = 0

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if not in_agent.get() or self._missed <= _TICKS:
            return
        self._missed = 0
        problem = f"it blocked the RolloutWorker for more than rollout.agent_limits.blocking_s={self._blocking_s:g}"
        raise AgentError(f"{problem}: await what takes long, or set rollout.agent_process=always", defect="blocked")

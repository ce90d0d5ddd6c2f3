"""Calls into the thread that owns an engine. No torch.

    any thread: call, post, future, stop ──commands──> engine thread: while wait(): run, step; end

The engine's thread consumes commands and waits in ``wait`` only. Every future is resolved, by a command or by ``end``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from realsys.errors import GenerationError

T = TypeVar("T")


class Mailbox:
    """Commands for one engine thread, and the futures of all open calls. ``ended``: why it takes no call any more."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self._stopping = False
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: set[Future[Any]] = set()

    # ---- any thread

    def future(self) -> Future[Any]:
        """Make the future of a call. Raises GenerationError after the end."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that goes away must abort, not cancel
        with self._wake:
            if self.ended is not None:
                raise GenerationError(self.ended, retryable=True)
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def post(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run ``command``."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Have the engine's thread run ``command``; the future gives its result."""
        future: Future[T] = self.future()
        self.post(lambda: future.set_result(command()))
        return future

    def stop(self) -> None:
        """Have ``wait`` return False from now on."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # ---- engine thread

    def wait(self, ready: Callable[[], object]) -> bool:
        """Block until there is a command, or ``ready()`` is true; return False when asked to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or ready())
            return not self._stopping

    def run(self) -> None:
        """Run the commands that are there."""
        while self._commands:
            self._commands.popleft()()

    def end(self, reason: str) -> None:
        """Take no more calls, and fail those that wait with a retryable error."""
        with self._wake:
            self.ended = reason
            waiting = list(self._open)
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(reason, retryable=True))

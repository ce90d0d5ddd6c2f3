"""Engines that run in one thread of this process, and the calls into that thread. No torch.

    any thread: generate, pause, abort, ... ──commands──> [mailbox] ──> engine thread: all commands, one turn,
                                                                        the snapshots that are due, repeat

The engine thread owns everything but the mailbox, so nothing else needs a lock. It waits in ``Mailbox.wait`` only. An
error in it ends all open calls with that error and leaves the thread, so that the process dies of it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from realsys.errors import GenerationError, WaitTimeout
from realsys.generation.backend import Snapshot
from realsys.generation.protocol import PauseMode

T = TypeVar("T")


class Mailbox:
    """Commands for one engine thread, and the futures of all open calls.

    Every future is resolved, by a command or by ``end``. ``ended`` is the reason why the mailbox refuses
    calls, None while it accepts them.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._stopping = False
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: set[Future[Any]] = set()

    # ---- any thread

    def future(self) -> Future[Any]:
        """Create the future of a call. Raises GenerationError after the end."""
        future: Future[Any] = Future()
        # A caller that leaves must abort its request. A cancelled future would make set_result raise.
        future.set_running_or_notify_cancel()
        # Under the lock of ``end``: a future is either refused here or failed there, never missed.
        with self._wake:
            if self.ended is not None:
                raise GenerationError(self.ended, retryable=True)
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def post(self, command: Callable[[], None]) -> None:
        """Queue ``command`` for the engine thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Queue ``command`` for the engine thread and return the future of its result."""
        future: Future[T] = self.future()
        self.post(lambda: future.set_result(command()))
        return future

    def stop(self) -> None:
        """Make ``wait`` return False from now on."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # ---- engine thread

    def wait(self, ready: Callable[[], object]) -> bool:
        """Block until a command is queued or ``ready()`` is true; return False after ``stop``."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or ready())
            return not self._stopping

    def run(self) -> None:
        """Run the queued commands."""
        while self._commands:
            self._commands.popleft()()

    def end(self, reason: str) -> None:
        """Refuse new calls, and fail those that wait with a retryable error."""
        with self._wake:
            self.ended = reason
            waiting = list(self._open)
        # Outside the lock: a callback of a future may call ``future`` or ``post``.
        for future in waiting:
            if not future.done():
                future.set_exception(GenerationError(reason, retryable=True))


@dataclass(frozen=True, slots=True)
class _Watch:
    """A snapshot that is due when the request ``rid`` has more than ``beyond`` tokens, or has ended."""

    rid: str
    beyond: int
    found: Future[Snapshot | None]


class ThreadedEngine(ABC):
    """Base of engines with one thread: the calls of a GenerationEngine that only post a command to it."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._paused = False
        self._watches: list[_Watch] = []  # belongs to the engine thread
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)

    # ---- any thread

    @property
    def failure(self) -> str | None:
        """Reason why the engine serves no more; None while it serves."""
        return self._mailbox.ended

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current turn; open calls fail with a retryable error."""
        self._mailbox.stop()
        join(self._thread, timeout_s)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop taking turns and queue new requests.

        in_place keeps the cache of running completions and retract drops it; both continue at
        ``resume``. abort ends all requests with the tokens they have.
        """

        def pause() -> None:
            self._paused = True
            if mode == "abort":
                self._end_requests(None)
            elif mode == "retract":
                self._drop_cache()

        return self._mailbox.call(pause)

    def resume(self) -> Future[None]:
        """Continue after a pause."""

        def resume() -> None:
            self._paused = False

        return self._mailbox.call(resume)

    def flush(self) -> Future[None]:
        """Drop the cached keys and values of completions that have ended."""
        return self._mailbox.call(self._flush)

    def abort(self, rid: str) -> Future[bool]:
        """End one request now, with the tokens it has. The result is False if no request has that id."""
        return self._mailbox.call(lambda: self._end_requests(rid))

    def snapshot(self, rid: str, beyond: int = -1) -> Future[Snapshot | None]:
        """Return the state of a request once it has more than ``beyond`` tokens; None if it has ended."""
        watch = _Watch(rid, beyond, self._mailbox.future())
        self._mailbox.post(lambda: self._watches.append(watch))
        return watch.found

    def abort_all(self) -> Future[None]:
        """End all requests now, with the tokens they have."""

        def abort_all() -> None:
            self._end_requests(None)

        return self._mailbox.call(abort_all)

    # ---- engine thread

    def _run(self) -> None:
        try:
            while self._mailbox.wait(self._has_work):
                # All commands before the turn: a pause or an abort must not wait for many turns.
                self._mailbox.run()
                self._turn()
                self._watches = [watch for watch in self._watches if not self._tell(watch)]
        except BaseException as error:
            self._mailbox.end(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._mailbox.end("the server is stopping")

    def _tell(self, watch: _Watch) -> bool:
        """Return True if the snapshot was due."""
        snapshot = self._snapshot(watch.rid)
        if snapshot is not None and snapshot.tokens <= watch.beyond:
            return False
        watch.found.set_result(snapshot)
        return True

    @abstractmethod
    def _has_work(self) -> bool:
        """Return True if ``_turn`` has something to do without a command."""

    @abstractmethod
    def _turn(self) -> None:
        """Do one piece of work, or nothing; commands run before the next turn."""

    @abstractmethod
    def _end_requests(self, rid: str | None) -> bool:
        """End one request, or all if None, with the tokens they have. Return True if any ended."""

    @abstractmethod
    def _snapshot(self, rid: str) -> Snapshot | None:
        """Return the state of a request; None if no request has that id."""

    def _drop_cache(self) -> None:  # noqa: B027  (an engine may have no cache)
        """Drop the cache of all completions, running or not."""

    def _flush(self) -> None:  # noqa: B027
        """Drop the cache of ended completions."""


def join(thread: threading.Thread, timeout_s: float) -> None:
    """Wait until ``thread`` has ended. Raises WaitTimeout."""
    thread.join(timeout_s)
    if thread.is_alive():
        raise WaitTimeout(f"thread {thread.name} did not end within {timeout_s:g} s")

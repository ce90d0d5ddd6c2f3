"""An event loop in its own thread, called from other threads."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from realsys.errors import GenerationError, WaitTimeout

T = TypeVar("T")


class LoopThread:
    """Runs ``main`` until it returns or ``close`` is called. Open calls then fail with a retryable error."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._main = main
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=name, daemon=True)
        self._lock = threading.Lock()  # guards _loop and _tasks: a loop that has closed must get no work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop: asyncio.Event
        self._running = threading.Event()

    def start(self, timeout_s: float = 30.0) -> None:
        """Return when the loop accepts work. Raises WaitTimeout if it does not start."""
        self._thread.start()
        if not self._running.wait(timeout_s):
            raise WaitTimeout(f"thread {self._thread.name} did not start its event loop within {timeout_s:g} s")

    def close(self, timeout_s: float) -> None:
        """Cancel everything and wait for the end of the thread. Raises WaitTimeout."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"thread {self._thread.name} did not end within {timeout_s:g} s")

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work()`` on the loop. Raises GenerationError if the thread has ended."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that leaves must abort, not cancel
        with self._lock:
            if self._loop is None:
                raise GenerationError("the server is stopping", retryable=True)
            self._loop.call_soon_threadsafe(self._spawn, work, future)
        return future

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` as a task, kept until it is done. Call it on the loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._resolve, future))

    def _resolve(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            future.set_exception(GenerationError("the server is stopping", retryable=True))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # One thread is enough: its jobs (reading weights, removing files) run one after the other anyway.
        self._loop.set_default_executor(ThreadPoolExecutor(1, f"{self._thread.name}-files"))
        main = asyncio.create_task(self._main(), name="main")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        self._running.set()
        try:
            await asyncio.wait({main, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with self._lock:
                self._loop = None
            await asyncio.sleep(0)  # work that was passed in before that becomes a task
            tasks = {main, stopping, *self._tasks}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not main.cancelled():
            main.result()  # an error in it ends the thread, and with it the process

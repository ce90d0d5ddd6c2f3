"""Episodes of a user's agent inside of the RolloutWorker: on its event loop, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import Any

from realsys.config.schema import RolloutConfig
from realsys.errors import AgentError
from realsys.harness.contract import CapturedRun
from realsys.rollout.agents.bounded import EpisodeTime
from realsys.rollout.agents.captured.watch import BlockedWatch, in_agent


class Inside:
    """Runs of an agent in this process. All episodes share one HTTP client.

    An async run shares the event loop with the RolloutWorker, so it must not block (``watch``). A run that is not async
    has a thread; a thread that does not end cannot be killed, and keeps its place.
    """

    def __init__(self, loaded: Any, rollout: RolloutConfig) -> None:
        self._timeout_s = rollout.agent_limits.episode_timeout_s
        self._run = CapturedRun(loaded, rollout.agent_args, self._timeout_s)
        self._client: Any = None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request, with the key of the episode
        self._blocking_s = rollout.agent_limits.blocking_s
        self._watch: BlockedWatch | None = None
        self._places = asyncio.Semaphore(rollout.agent_processes)  # threads of plain functions
        self._taken = 0.0  # time at which the last place was taken

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Any:
        """Return what ``run`` returns. Raises AgentError if it takes too long, and its exceptions."""
        if self._run.is_async:
            return await time.bound(self._call(data, base_url, api_key))
        client = self._shared()
        await self._take_place()
        return await time.bound(_result(self._thread(data, base_url, api_key, client)))

    async def close(self) -> None:
        """Close the HTTP client."""
        if self._watch is not None:
            self._watch.close()
        if self._client is not None:
            await self._client.aclose() if self._run.is_async else self._client.close()

    async def _call(self, data: dict[str, Any], base_url: str, api_key: str) -> Any:
        if self._watch is None and threading.current_thread() is threading.main_thread():
            self._watch = BlockedWatch(self._blocking_s)
        client = self._shared()
        in_agent.set(True)
        return await self._run.call(data, base_url, api_key, client)

    async def _take_place(self) -> None:
        """Wait for a thread; the time of the episode starts later. Raises AgentError if no thread ends in its time."""
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._places.acquire()
                    self._taken = loop.time()
                    return
            if self._taken <= begin:
                problem = f"none of its threads ended within rollout.agent_limits.episode_timeout_s={self._timeout_s:g}"
                raise AgentError(f"{problem}: set rollout.agent_process=always", defect="threads")

    def _thread(self, *arguments: Any) -> Future[Any]:
        """Start a run. Its thread returns the place when it ends; the exit of the process does not wait for it."""
        ended: Future[Any] = Future()
        ended.set_running_or_notify_cancel()  # it cannot be cancelled
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                ended.set_result(self._run.call(*arguments))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code may raise anything
                ended.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._places.release)

        try:
            threading.Thread(target=work, name="agent", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._places.release()
            raise
        return ended

    def _shared(self) -> Any:
        if self._client is None:  # on the event loop, to which it belongs
            self._client = self._run.make_client()
        return self._client


async def _result(ended: Future[Any]) -> Any:
    return await asyncio.wrap_future(ended)

"""The agent that plays a user's ``run(data, base_url, api_key, http_client)``: what the gateway records is its episode.

row of the dataset ──> run ──base_url──> gateway ──> Capture ──rows──┐
                        └─reward, dict or None──> RunOutcome ───────> Episode
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import numbers
import reprlib
import signal
import threading
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy as np

from realsys.agent_runner.contract import CapturedRun
from realsys.config.schema_rollout import RolloutConfig
from realsys.data.prompts import Prompt
from realsys.errors import AgentError
from realsys.rollout.agents.contract import PLACES, AgentParts, EpisodeTime, Session
from realsys.rollout.environments import Judgement, Task
from realsys.types import Episode


class AgentRuns(Protocol):
    """Caller of a user's ``run``."""

    def __call__(self, data: dict[str, Any], base_url: str, api_key: str, time: EpisodeTime) -> Awaitable[Any]:
        """Return what ``run`` returns. ``time`` starts when ``run`` does."""
        ...

    async def close(self) -> None: ...


class CapturedAgent:
    """Agent with ``base_url``."""

    def __init__(self, parts: AgentParts, runs: AgentRuns) -> None:
        self._parts = parts
        self._runs = runs

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises AgentError, the exceptions of ``run``, and errors of the engine.

        `error-is-not-data`: an agent may hide an error of the engine, or die of it; both are that error.
        """
        time = EpisodeTime(self._parts.config.rollout.agent_limits.episode_timeout_s)
        try:
            returned = await self._runs(data_of(task.prompt), session.base_url, session.api_key, time)
        except Exception as error:
            raise session.capture.error or error from None
        if session.capture.error is not None:
            raise session.capture.error
        outcome = outcome_of(returned)
        rows = session.capture.rows(outcome.rewards)
        if not rows:
            raise AgentError("run received no completion from base_url, so there is nothing to train")
        judgement = await time.bound(self._judgement(task, session, outcome))
        metrics = session.capture.metrics() | judgement.metrics
        return Episode(rows, judgement.reward, judgement.correct, metrics, judgement.answer)

    async def close(self) -> None:
        """End the processes of the agent, and its HTTP client."""
        await self._runs.close()

    async def _judgement(self, task: Task, session: Session, outcome: RunOutcome) -> Judgement:
        if outcome.reward is not None:
            return Judgement(outcome.reward, outcome.correct, dict(outcome.metrics), answer=outcome.answer)
        judgement = await self._parts.environment.judge(task, session.capture.last())
        correct = judgement.correct if outcome.correct is None else outcome.correct
        answer = judgement.answer if outcome.answer is None else outcome.answer
        return Judgement(judgement.reward, correct, judgement.metrics | outcome.metrics, answer=answer)


def data_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row of the dataset: ``prompt`` is a text, or messages as plain dicts."""
    return {**prompt.extra, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}


# ---- result of a user's ``run``: a reward, a dict, or None. Pure


_KEYS = ("reward", "rewards", "correct", "metrics", "answer")
_RESULT = "run must return a reward, a dict, or None"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Result of an episode.

    reward   None: the environment judges the last completion
    rewards  id of a completion -> reward for its last token, in addition to ``reward``
    """

    reward: float | None = None
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)


def outcome_of(returned: Any) -> RunOutcome:
    """Read what ``run`` returned. Raises AgentError with the problem in one line.

    A dict with other keys than those of RunOutcome maps ids of completions to rewards.
    """
    if returned is None:
        return RunOutcome()
    if isinstance(returned, bool | np.bool_):
        return RunOutcome(float(returned), bool(returned))
    if _is_number(returned):
        return RunOutcome(float(returned))
    if not isinstance(returned, Mapping):
        raise AgentError(f"run returned {reprlib.repr(returned)}: {_RESULT}")
    known = [key for key in returned if key in _KEYS]
    if not known:
        return RunOutcome(0.0 if returned else None, rewards=_rewards(returned))
    if unknown := [key for key in returned if key not in _KEYS]:
        raise AgentError(f"run returned a dict with the key {unknown[0]!r}: use {', '.join(_KEYS)}")
    reward, rewards = returned.get("reward"), _rewards(returned.get("rewards") or {})
    if reward is None and rewards:
        reward = 0.0
    if reward is not None and not _is_number(reward):
        raise AgentError(f"run returned the reward {reprlib.repr(reward)}: it must be a number or None")
    correct, metrics = returned.get("correct"), returned.get("metrics") or {}
    return RunOutcome(None if reward is None else float(reward), correct, metrics, returned.get("answer"), rewards)


def _rewards(by_id: Any) -> dict[str, float]:
    if not isinstance(by_id, Mapping) or not all(isinstance(key, str) for key in by_id):
        raise AgentError(f"run returned the rewards {reprlib.repr(by_id)}: they must be numbers by id of a completion")
    for key, value in by_id.items():
        if not _is_number(value):
            raise AgentError(f"run returned {reprlib.repr(value)} for {key!r}: it must be a number")
    return {key: float(value) for key, value in by_id.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.number)


# ---- episodes inside of the RolloutWorker: on its event loop, or in a thread


class Inside:
    """Runs of an agent in this process. All episodes share one HTTP client.

    An async run shares the event loop with the RolloutWorker, so it must not block (``BlockedWatch``). A run that is
    not async has a thread; a thread that does not end cannot be killed, and keeps its place.
    """

    def __init__(self, loaded: Any, rollout: RolloutConfig) -> None:
        self._timeout_s = rollout.agent_limits.episode_timeout_s
        self._run = CapturedRun(loaded, rollout.agent_args, self._timeout_s)
        self._client: Any = None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request, with the key of the episode
        self._watch: BlockedWatch | None = None
        self._places = asyncio.Semaphore(PLACES)  # threads of plain functions
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
            self._watch = BlockedWatch()
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


# ---- watch over async agents in the RolloutWorker: one that blocks the event loop fails alone
#
#     thread ──tick──> event loop ──answer──> thread
#        └─ no answer for too long: SIGUSR2 ──> handler in the main thread ──AgentError──> inside of the agent's code
#
# The handler raises only if the code of an agent is running: in its context, which the tasks that it starts inherit.
# Code that holds the interpreter without running Python, such as a long matrix product, is interrupted when it
# returns.


BLOCKED_S = 10.0  # the other episodes stand still for this time, and the manager's lease on their tickets is longer
_TICKS = 10  # ticks in ``BLOCKED_S``

in_agent: ContextVar[bool] = ContextVar("in_agent", default=False)  # True in the code of agents


class BlockedWatch:
    """Watch of the event loop that runs when it is started, in the main thread."""

    def __init__(self) -> None:
        self._blocking_s = BLOCKED_S
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
        problem = f"it blocked the RolloutWorker for more than {self._blocking_s:g} s"
        raise AgentError(f"{problem}: await what takes long, or set rollout.agent_process=always", defect="blocked")

"""The contract of an agent: it plays one episode of a task with any number of engine calls.

    AgentParts ──> Agent.run(task, session) ──session.generate──> completions ──environment.judge──> Episode

An agent is named in ``rollout.agent``: a built-in name or ``package.module:Class``. This is the native contract; that
of agents with ``base_url`` is in ``realsys.agent_runner.contract``. A class may also have two static methods, which the
launcher calls before anything starts, with ``rollout.agent_args`` as keyword arguments:

    longest_row(config, **args) -> int           tokens of the longest row; without it: prompt + one completion
    check(config, tokenizer, **args) -> None     raises ConfigError if the model's tokenizer does not fit the agent

and two marks:

    one_turn = True       an episode has one engine call: the engine then retains no keys for a later one
    plays_steps = True    it plays environments with steps; without it, such a ``rollout.environment`` is refused
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.rollout.environments import Environment, Response, StepEnvironment, Task
from realsys.types import Episode, Row

#: episodes that one RolloutWorker runs in processes or threads at a time; further ones wait. A host has memory for
#: them, and an episode that waits for the engine takes no core.
PLACES = 128


class EpisodeCapture(Protocol):
    """Record of what went over an episode's ``base_url``."""

    @property
    def error(self) -> Exception | None:
        """The first failure of the engine that no retry has made good."""
        ...

    def rows(self, rewards: Mapping[str, float] = ...) -> list[Row]:
        """Return the rows of the completions that the agent has received.

        ``rewards``: id of a completion -> reward for its last token. Raises AgentError for an unknown id.
        """
        ...

    def exclude(self, sessions: Collection[str]) -> None:
        """Take the completions of requests with these values of X-Session-ID out of training."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def last(self) -> Response:
        """Return the completion that was delivered last. Raises AgentError without one."""
        ...


class Session(Protocol):
    """View of the engine for one episode. Each call has a separate id, seed and reservation."""

    @property
    def spec(self) -> SamplingSpec:
        """Sampling settings of the trial, or of the evaluation's data set."""
        ...

    async def generate(
        self, token_ids: Sequence[int], spec: SamplingSpec | None = None, *, policy: str = ""
    ) -> Completion:
        """Sample one completion after ``token_ids``, with the session's settings unless others are given.

        ``policy``: name of a version that the trainer has pinned, which samples all of it. In a row its tokens are
        context. "": the policy in training. Raises StreamError, with the names that are pinned, for another one.

        An episode may have several calls in progress. A weight update or the failure of a server does not end
        a call. Raises GenerationError if the completion cannot be sampled.
        """
        ...

    @property
    def base_url(self) -> str:
        """Address of an OpenAI endpoint for this episode alone, with its ``/v1``."""
        ...

    @property
    def api_key(self) -> str:
        """Key of that endpoint."""
        ...

    @property
    def capture(self) -> EpisodeCapture:
        """Record of the calls of that endpoint."""
        ...


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Collaborators of an agent: ``rollout.agent=module:Class`` is called as ``Class(parts, **agent_args)``."""

    config: Config
    tokenizer: TextTokenizer
    environment: Environment  # a StepEnvironment only if the agent has ``plays_steps``

    def response(self, completion: Completion, turn: int = 0) -> Response:
        """Build the Response that the environment judges. ``turn``: number of the completion, from 0."""
        text = self.tokenizer.completion_text(completion.tokens.tolist())
        return Response(text, completion.finish_reason, len(completion.tokens), turn)


class Agent(Protocol):
    """Player of episodes. One object per RolloutWorker plays many episodes at the same time."""

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises RealsysError if it failed: it then has no reward, not a reward of 0.

        Any other exception is a defect of the agent: it fails this episode and is logged with its place.
        """
        ...


class ClosableAgent(Agent, Protocol):
    """An agent as ``agents.build`` returns it."""

    async def close(self) -> None:
        """End the processes and threads of the agent."""
        ...


# ---- bound on the time of an episode
#
# `stuck-costs-itself`: an episode that does not end fails alone.


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
    """A native agent whose episodes may take ``timeout_s`` each, and are closed in ``environment`` if it has steps."""

    def __init__(self, agent: Agent, timeout_s: float, environment: Environment | None = None) -> None:
        self.agent = agent
        self._timeout_s = timeout_s
        self._environment = environment if isinstance(environment, StepEnvironment) else None

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode."""
        try:
            return await EpisodeTime(self._timeout_s).bound(self.agent.run(task, session))
        finally:
            if self._environment is not None:
                await self._environment.close(task)

    async def close(self) -> None:
        """Close the agent, if it has a ``close``, and wait for the episodes that are being closed."""
        if self._environment is not None:
            await self._environment.wait_closed()
        close = getattr(self.agent, "close", None)
        if close is not None:
            await close()

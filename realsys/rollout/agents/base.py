"""The contract of an agent: it plays one episode of a task with any number of engine calls.

    AgentParts ──> Agent.run(task, session) ──session.generate──> completions ──environment.judge──> Episode

An agent is named in ``rollout.agent``: a built-in name or ``package.module:Class``. This is the native contract; that
of agents with ``base_url`` is in ``realsys.harness.contract``. A class may also have two static methods, which the
launcher calls before anything starts, with ``rollout.agent_args`` as keyword arguments:

    longest_row(config, **args) -> int           tokens of the longest row; without it: prompt + one completion
    check(config, tokenizer, **args) -> None     raises ConfigError if the model's tokenizer does not fit the agent

and ``one_turn = True``, if an episode has one engine call: the engine then retains no keys for a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import Generated, SamplingSpec
from realsys.rollout.environments.base import Environment
from realsys.rollout.task import Response, Task
from realsys.types import Episode, Row


class Capture(Protocol):
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

    async def generate(self, token_ids: Sequence[int], spec: SamplingSpec | None = None) -> Generated:
        """Sample one completion after ``token_ids``, with the session's settings unless others are given.

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
    def capture(self) -> Capture:
        """Record of the calls of that endpoint."""
        ...


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Collaborators of an agent: ``rollout.agent=module:Class`` is called as ``Class(parts, **agent_args)``."""

    config: Config
    tokenizer: TextTokenizer
    environment: Environment

    def response(self, completion: Generated, turn: int = 0) -> Response:
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

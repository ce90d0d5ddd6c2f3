"""The contract of an agent: it plays one episode of a task with as many calls of the engine as it likes.

    AgentParts ──> Agent.run(task, session) ──session.generate──> completions ──environment.judge──> Episode

An agent is named in ``rollout.agent``: a built-in name or ``package.module:Class``. A class may also have two static
methods that the launcher calls before anything starts, with ``rollout.agent_args`` as keyword arguments:

    longest_row(config, **args) -> int           tokens of the longest row; without it: prompt + one completion
    check(config, tokenizer, **args) -> None     raises ConfigError for what does not fit the model's tokenizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import Generated
from realsys.rollout.environments.base import Environment
from realsys.rollout.task import Response, Task
from realsys.types import Episode


class Session(Protocol):
    """The engine as one episode sees it. Each call has an id, a seed and a reservation of its own."""

    async def generate(self, token_ids: Sequence[int]) -> Generated:
        """Sample one completion after ``token_ids`` with the trial's sampling settings.

        An episode may have several calls under way. A weight update or the death of a server does not end a call.
        Raises GenerationError when the completion cannot be sampled.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Parts that an agent is built from: ``rollout.agent=module:Class`` is called as ``Class(parts, **agent_args)``."""

    config: Config
    tokenizer: TextTokenizer
    environment: Environment

    def response(self, completion: Generated, turn: int = 0) -> Response:
        """Make of a completion what the environment judges. ``turn``: its number in the episode, from 0."""
        text = self.tokenizer.answer_text(completion.tokens.tolist())
        return Response(text, completion.finish_reason, len(completion.tokens), turn)


class Agent(Protocol):
    """One object per RolloutWorker, for many episodes at a time."""

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises RealsysError if it failed: there is no reward then, and no reward of 0.

        Any other exception is a defect of the agent: it fails this episode and is logged with its place.
        """
        ...

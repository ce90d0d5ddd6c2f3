"""The contract of an agent: it plays one episode of a task with any number of engine calls.

    AgentParts ──> Agent.run(task, session) ──session.generate──> completions ──environment.judge──> Episode

An agent is named in ``rollout.agent``: a built-in name or ``package.module:Class``. A class may also have two static
methods that the launcher calls before anything starts, with ``rollout.agent_args`` as keyword arguments:

    longest_row(config, **args) -> int           tokens of the longest row; without it: prompt + one completion
    check(config, tokenizer, **args) -> None     raises ConfigError if the model's tokenizer does not fit the agent
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
    """View of the engine for one episode. Each call has a separate id, seed and reservation."""

    async def generate(self, token_ids: Sequence[int]) -> Generated:
        """Sample one completion after ``token_ids`` with the trial's sampling settings.

        An episode may have several calls in progress. A weight update or the failure of a server does not end
        a call. Raises GenerationError if the completion cannot be sampled.
        """
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

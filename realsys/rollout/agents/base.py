"""The contract of an agent: it plays one episode of a task with as many calls of the engine as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import Generated
from realsys.rollout.environments.base import Environment
from realsys.rollout.task import Task
from realsys.types import Episode


class Session(Protocol):
    """The engine as one episode sees it. Each call has an id, a seed and a reservation of its own."""

    async def generate(self, token_ids: Sequence[int]) -> Generated:
        """Sample one completion after ``token_ids`` with the trial's sampling settings.

        A weight update or the death of a server does not end it. Raises GenerationError when it cannot be sampled.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What an agent is built from: ``rollout.agent=module:Class`` is called as ``Class(parts, **agent_args)``."""

    config: Config
    tokenizer: TextTokenizer
    environment: Environment


class Agent(Protocol):
    """One object per RolloutWorker, for many episodes at a time."""

    async def run(self, task: Task, session: Session) -> Episode:
        """Play one episode. Raises RealsysError if it failed: there is no reward then, and no reward of 0."""
        ...

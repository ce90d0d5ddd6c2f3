"""The contract of an environment: it judges what an agent's policy wrote, and may answer with feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.reward.verifiers.base import Verdict
from realsys.rollout.task import Response, Task


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an environment says of a response.

    reward    finite; the agent decides what it makes of the rewards of several turns
    correct   None if the task has no right or wrong
    metrics   numbers for the step log, averaged over episodes by name
    feedback  text of the next user turn; None: the agent's own feedback, if it has any
    done      the episode ends here, whatever turns are left
    """

    reward: float
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    feedback: str | None = None
    done: bool = False


#: Runs ``data.verifier`` in a verifier process. Raises RewardError when there is no verdict; an error is not data.
Verify = Callable[[Task, Response], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class EnvironmentParts:
    """What an environment is built from: ``rollout.environment=module:Class`` is called as ``Class(parts, **args)``."""

    config: Config
    tokenizer: TextTokenizer
    verify: Verify


class Environment(Protocol):
    """One object per RolloutWorker, for many episodes at a time: state of an episode belongs into ``task.state``."""

    async def judge(self, task: Task, response: Response) -> Judgement:
        """Judge one response. Raises RewardError when it cannot: the episode then fails, and has no reward."""
        ...

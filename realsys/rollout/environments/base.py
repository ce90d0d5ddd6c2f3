"""The contract of an environment: it judges a completion, and may return feedback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.reward.verifiers.contract import Verdict
from realsys.rollout.task import Response, Task


@dataclass(frozen=True, slots=True)
class Judgement:
    """Judgement of a response.

    reward    finite; the agent combines the rewards of several turns
    correct   None if the task has no right or wrong
    metrics   numbers for the step log, averaged over episodes by name
    feedback  text of the next user turn; None: the default feedback of the agent, if it has one
    done      True ends the episode, even if turns are left
    answer    final answer of the response, for the majority vote of an evaluation; None if there is none
    """

    reward: float
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    feedback: str | None = None
    done: bool = False
    answer: str | None = None


#: Runs ``data.verifier``, or the one of the evaluation's data set, in a verifier process. Raises RewardError without a
#: verdict: an error is no reward.
Verify = Callable[[Task, Response], Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class EnvironmentParts:
    """Collaborators of an environment: ``rollout.environment=module:Class`` is called as ``Class(parts, **args)``."""

    config: Config
    tokenizer: TextTokenizer
    verify: Verify


class Environment(Protocol):
    """Judge of responses. One object per RolloutWorker serves many episodes: keep their state in ``task.state``."""

    async def judge(self, task: Task, response: Response) -> Judgement:
        """Judge one response. Raises RewardError if it cannot: the episode then fails and has no reward."""
        ...

"""Environments: they judge the completions of an episode's task, and may return feedback.

    Task ──agent──> Response ──Environment.judge──> Judgement: reward, correct, feedback

Names of environments: ``realsys.config.doors``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from realsys.config.doors import ENVIRONMENT
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.schema import Config
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.observe.spans import span
from realsys.reward.pool import Verifiers
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.types import FinishReason, Ticket

# ---- inputs of agents and environments


@dataclass(slots=True)
class Task:
    """One episode to play: the prompt with its dataset row, its ticket, and its number in the group.

    ``prompt.extra`` has the keys of the dataset row other than prompt and answer, unchanged.
    """

    prompt: Prompt
    ticket: Ticket
    episode: int = 0  # number of the episode in its group, from 0
    state: dict[str, Any] = field(default_factory=dict)  # free for the environment, private to this episode

    @property
    def unit(self) -> str:
        """Name of this episode in the spans of all processes."""
        return f"{self.ticket.unit}/{self.episode}"


@dataclass(frozen=True, slots=True)
class Response:
    """One completion of an episode, for the environment to judge."""

    text: str  # without the end-of-text token
    finish_reason: FinishReason
    tokens: int  # sampled tokens of this completion
    turn: int = 0  # number of the completion in its episode, from 0


# ---- contract


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


# ---- environment ``verifier``: its judgement is the verdict of ``data.verifier``


class VerifierEnvironment:
    """Environment that verifies each finished completion; one that was cut off is wrong without a verdict."""

    def __init__(self, parts: EnvironmentParts) -> None:
        self._verify = parts.verify
        self._reward = parts.config.rollout.reward

    async def judge(self, task: Task, response: Response) -> Judgement:
        """Take the verifier's reward; if it has none, rollout.reward.correct or .wrong. Add its bonus.

        Raises RewardError.
        """
        if response.finish_reason != "stop":
            return Judgement(self._reward.wrong, correct=False)
        verdict = await self._verify(task, response)
        reward = verdict.reward
        if reward is None:
            reward = self._reward.correct if verdict.correct else self._reward.wrong
        return Judgement(reward + verdict.bonus, verdict.correct, verdict.metrics, answer=verdict.answer)


# ---- choice of the environment


def build(config: Config, tokenizer: TextTokenizer, pool: Verifiers) -> Environment:
    """Build the environment that ``rollout.environment`` names. Raises ConfigError."""
    of_sets = {name: made.verifier for name, made in evaluation_sets(config).items()}

    async def verify(task: Task, response: Response) -> Verdict:
        prompt = task.prompt
        item = Item(prompt.text, response.text, prompt.answer, prompt.extra)
        with span("reward", task.unit):
            return await pool.verify(of_sets.get(task.ticket.set, config.data.verifier), item)

    parts = EnvironmentParts(config, tokenizer, verify)
    arguments = config.rollout.environment_args
    environment: Environment = ENVIRONMENT.make(config.rollout.environment, parts, arguments)
    return environment

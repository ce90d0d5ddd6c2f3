"""Environments: they judge the completions of an episode's task, and may return feedback.

    Task ──agent──> Response ──Environment.judge──> Judgement: reward, correct, feedback

One with steps has a state for each episode, which it frees at the end:

    Task ──reset──> first observation ──agent──> Response ──step──> Judgement, again and again ──> close

`closed-once`: after ``reset`` was called, ``close`` is called once, also if the episode fails, takes too long or is
cancelled. ``StepEnvironment`` counts, and ``agents.contract.Bounded`` calls.

Names of environments: ``realsys.config.doors``.
"""

from __future__ import annotations

import asyncio
import logging
import numbers
import reprlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from realsys.agent_runner.contract import described
from realsys.config.doors import ENVIRONMENT, has_steps
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.schema import Config
from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError
from realsys.observe.spans import span
from realsys.reward.pool import Verifiers
from realsys.reward.verifiers.contract import Item, Verdict
from realsys.types import FinishReason, Ticket

log = logging.getLogger(__name__)

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

    reward    finite; the agent combines the rewards of several turns. Of a step: what this step adds
    correct   None if the task has no right or wrong
    metrics   numbers for the step log, averaged over episodes by name
    feedback  text of the next user turn, the next observation; None: the default feedback of the agent, if it has one
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


class Steps(Protocol):
    """Environment with steps, in place of Environment. One object per RolloutWorker: keep states in ``task.state``."""

    async def reset(self, task: Task) -> str | None:
        """Begin an episode. Return the text of a user turn after the prompt; None if the prompt says it all."""
        ...

    async def step(self, task: Task, response: Response) -> Judgement:
        """Play one response. ``done`` ends the episode, ``feedback`` is the next observation."""
        ...

    async def close(self, task: Task) -> None:
        """Free what the episode holds. ``reset`` or ``step`` may have failed or been cancelled in the middle."""
        ...


# ---- environments with steps

CLOSE_S = 30.0  # time of one close; the end of the episode waits for it


class StepEnvironment:
    """The environment with steps of a user, as agents get it: it checks what that returns, and closes it once.

    It is an Environment that judges nothing, so that only an agent with ``plays_steps`` must know of it.
    """

    def __init__(self, environment: Steps, name: str) -> None:
        self._environment = environment
        self._name = f"rollout.environment={name}"
        self._open: dict[int, Task] = {}  # id of a task whose reset was called -> the task, which keeps the id
        self._closing: set[asyncio.Task[None]] = set()
        self._failed = Counter[str]()  # kind and place of the errors of close

    async def judge(self, task: Task, response: Response) -> Judgement:
        """Raise AgentError."""
        raise AgentError(f"{self._name} has no judge: call reset, and step with each response")

    async def reset(self, task: Task) -> str | None:
        """Begin an episode; return its first observation. Raises AgentError for another result, or a second call."""
        if id(task) in self._open:
            raise AgentError(f"{self._name}: reset was called twice in an episode: call close in between")
        self._open[id(task)] = task  # before the call: one that fails half way may hold something
        observation = await self._environment.reset(task)
        if observation is not None and not isinstance(observation, str):
            problem = f"reset returned {reprlib.repr(observation)}: it must return a text or None"
            raise AgentError(f"{self._name}: {problem}")
        return observation

    async def step(self, task: Task, response: Response) -> Judgement:
        """Play one response. Raises AgentError for another result than a Judgement whose reward is a number."""
        judgement = await self._environment.step(task, response)
        if not isinstance(judgement, Judgement) or not isinstance(judgement.reward, numbers.Real):
            problem = f"step returned {reprlib.repr(judgement)}: it must return a Judgement, and its reward a number"
            raise AgentError(f"{self._name}: {problem}")
        return judgement

    async def close(self, task: Task) -> None:
        """End an episode if its reset was called. Takes up to CLOSE_S, and logs errors; they change no result."""
        if self._open.pop(id(task), None) is None:
            return
        # A task of its own: the group may be complete, and cancel this episode, while it closes.
        closing = asyncio.create_task(self._close(task))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def wait_closed(self) -> None:
        """Wait for the closes whose episodes were cancelled."""
        await asyncio.gather(*self._closing)

    async def _close(self, task: Task) -> None:
        async def attempt() -> tuple[str, str]:
            try:
                await self._environment.close(task)
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code may raise anything
                failed = described(error)
                return f"{failed['type']} at {failed['place']}", failed.in_words()
            return "", ""

        work = asyncio.create_task(attempt())
        await asyncio.wait((work,), timeout=CLOSE_S)
        late = f"it did not end within {CLOSE_S:g} s"
        defect, problem = work.result() if work.done() else (late, late)
        work.cancel()
        if not defect:
            return
        self._failed[defect] += 1
        if (times := self._failed[defect]).bit_count() == 1:  # 1, 2, 4, ...: a line each would fill the log
            log.error("%s: close failed for %s, %d times so far: %s", self._name, task.unit, times, problem)


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
    name, arguments = config.rollout.environment, config.rollout.environment_args
    environment: Any = ENVIRONMENT.make(name, parts, arguments)
    if has_steps(ENVIRONMENT.load(name)):
        return StepEnvironment(environment, name)
    if not hasattr(environment, "judge"):
        problem = "made an object without judge: name the class itself if it has reset, step and close"
        raise ConfigError("rollout.environment", name, problem)
    made: Environment = environment
    return made

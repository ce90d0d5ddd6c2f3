"""Agents run the episode of one ticket: which requests are made, and how the outcome becomes trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from realsys.config.schema import SamplingConfig
from realsys.data.prompts import Prompt
from realsys.errors import ConfigError
from realsys.generation.client import Generated, SamplingSpec
from realsys.rollout.environment import Environment
from realsys.types import Ticket, Trajectory


@dataclass(slots=True)
class Episode:
    """What an agent made of a ticket: ``correct[k]`` belongs to ``trajectories[k]``."""

    trajectories: list[Trajectory]
    correct: list[bool]
    extra: dict[str, float] = field(default_factory=dict)  # seconds and counts, for the group's record


class Agent(Protocol):
    async def run(self, ticket: Ticket, prompt: Prompt) -> Episode:
        """``ticket.n`` trajectories. Raises RealsysError if the episode failed; then there is no reward at all."""
        ...


class Generation(Protocol):
    """The part of PartialRolloutManager that an agent needs."""

    async def generate(self, ticket: Ticket, prompt: Sequence[int], spec: SamplingSpec) -> list[Generated]: ...


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What any agent is built from."""

    generation: Generation
    environment: Environment
    sampling: SamplingSpec


class MathSingleTurnAgent:
    """One question, ``n`` independent answers, the reward at the end of each."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    async def run(self, ticket: Ticket, prompt: Prompt) -> Episode:
        begin = time.perf_counter()
        answers = await self._parts.generation.generate(ticket, prompt.ids, replace(self._parts.sampling, n=ticket.n))
        generated = time.perf_counter()
        verdicts = await self._parts.environment.judge(prompt, answers)
        head = np.asarray(prompt.ids, np.int32)
        trajectories = [
            Trajectory(
                tokens=np.concatenate([head, answer.tokens]),
                logprobs=answer.logprobs,
                versions=answer.versions,
                prompt_len=len(head),
                reward=verdict.reward,
                finish_reason=answer.finish_reason,
                route=answer.route,
            )
            for answer, verdict in zip(answers, verdicts, strict=True)
        ]
        seconds = {"generate_s": generated - begin, "reward_s": time.perf_counter() - generated}
        return Episode(trajectories, [verdict.correct for verdict in verdicts], seconds)


_AGENTS: dict[str, Callable[[AgentParts], Agent]] = {"math_single_turn": MathSingleTurnAgent}


def make_agent(name: str, parts: AgentParts) -> Agent:
    """The agent called ``name`` in rollout.agent. Raises ConfigError."""
    if name not in _AGENTS:
        raise ConfigError("rollout.agent", name, f"no such agent; known: {', '.join(_AGENTS)}")
    return _AGENTS[name](parts)


def sampling_spec(config: SamplingConfig, end_of_text: Sequence[int]) -> SamplingSpec:
    """The trial's sampling settings, with the tokenizer's own stop tokens; ``n`` is set per ticket."""
    return SamplingSpec(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k or -1,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        min_new_tokens=config.min_new_tokens,
        stop=tuple(config.stop),
        stop_token_ids=tuple(dict.fromkeys((*end_of_text, *config.stop_token_ids))),
        new_tokens_per_chunk=config.new_tokens_per_chunk,
    )

"""Inputs of agents and environments: the task of one episode, and a response to judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from realsys.data.prompts import Prompt
from realsys.types import FinishReason, Ticket


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

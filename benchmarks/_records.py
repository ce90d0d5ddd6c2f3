"""Single-turn records: a prompt, then one completion that is trained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from realsys.types import F32, I32, Episode, Group, Row, SequenceRef, Ticket


def single_turn(tokens: I32, logprobs: F32, versions: I32, reward: float) -> Episode:
    """An episode whose last ``len(logprobs)`` tokens were sampled."""
    mask = np.arange(len(tokens)) >= len(tokens) - len(logprobs)
    return Episode([Row(tokens, mask, logprobs, versions, "stop")], reward, correct=reward > 0)


def group_of(ticket: Ticket, episodes: Iterable[Episode], **times: float) -> Group:
    return Group(ticket, list(episodes), "rollout_worker/0", **times)


def make_ref(name: str, length: int, prompt: int, reward: float, number: int) -> SequenceRef:
    """A row of an episode of its own, in a group of its own."""
    return SequenceRef(name, length, length - prompt, reward, False, number, number, length - prompt)

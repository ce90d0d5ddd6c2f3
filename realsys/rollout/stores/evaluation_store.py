"""Completions of evaluations, as a RolloutWorker stores them before it reports their end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import numpy as np

from realsys.data.prompts import Prompt
from realsys.observe.evaluation_records import EvalSample, append_sample
from realsys.types import Episode, Ticket


class Decoder(Protocol):
    """The part of TextTokenizer that this module needs."""

    def decode(self, ids: list[int]) -> str: ...


class EvaluationStore:
    """Store of one RolloutWorker. ``root``: ``paths.evaluations``. Each ``incarnation`` writes a file."""

    def __init__(self, root: Path, tokenizer: Decoder, incarnation: str) -> None:
        self._root = root
        self._tokenizer = tokenizer
        self._incarnation = incarnation

    async def store(self, ticket: Ticket, prompt: Prompt, episode: Episode, worker: str) -> None:
        """Append the completion of an evaluation's ticket. Raises OSError."""
        sample = self.sample_of(ticket, prompt, episode, worker)
        part = f"{worker}-{self._incarnation}"
        await asyncio.to_thread(append_sample, self._root / ticket.eval_id, part, sample)

    def sample_of(self, ticket: Ticket, prompt: Prompt, episode: Episode, worker: str) -> EvalSample:
        """Return the record of an episode. Its text is that of all rows, each after the tokens that it was given."""
        spans = [span for row in episode.rows if (span := row.version_span) is not None]
        reasons = [row.finish_reason for row in episode.rows]
        first = episode.rows[0]
        start = int(np.argmax(first.loss_mask)) if first.loss_mask.any() else len(first.tokens)
        texts = [self._tokenizer.decode([int(token) for token in first.tokens[start:]])]
        texts += [self._tokenizer.decode([int(token) for token in row.tokens]) for row in episode.rows[1:]]
        return EvalSample(
            eval_id=ticket.eval_id,
            set=ticket.set,
            problem=ticket.prompt_index,
            sample=ticket.sample,
            attempt=ticket.attempt,
            version_min=min((low for low, _ in spans), default=ticket.version),
            version_max=max((high for _, high in spans), default=ticket.version),
            prompt=prompt.text,
            completion="\n".join(texts),
            reference=prompt.answer,
            reward=episode.reward,
            correct=episode.correct,
            finish_reason=next((reason for reason in reasons if reason != "stop"), "stop"),
            tokens=episode.loss_tokens,
            answer=episode.answer,
            metrics=episode.metrics,
            worker=worker,
            seed=ticket.seed,
        )

"""Completions that a RolloutWorker keeps on disk for people: those of evaluations, and groups that were not trained.

The completion of an evaluation is stored before the worker reports its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from realsys.data.prompts import Prompt
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from realsys.observe.dropped_groups import MOST_TEXT, DroppedEpisode, DroppedGroup, DroppedWriter, Room
from realsys.observe.evaluation_records import EvalSample, append_sample
from realsys.types import Episode, Row, Ticket


class EvaluationStore:
    """Store of one RolloutWorker. ``root``: ``paths.evaluations``. Each ``incarnation`` writes a file."""

    def __init__(self, root: Path, tokenizer: TextTokenizer, incarnation: str) -> None:
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


# ---- dropped and failed groups, as people see them later (``realsys.observe.dropped_groups``)


#: error of an episode, and its last call of the engine: the tokens before it, and the completion
Failure = tuple[str, tuple[Sequence[int], Completion] | None]


class DroppedStore:
    """Store of one RolloutWorker."""

    def __init__(self, writer: DroppedWriter) -> None:
        self._writer = writer

    def add(
        self,
        ticket: Ticket,
        prompt: Prompt,
        reason: str,
        episodes: Mapping[int, Episode],
        failed: Mapping[int, Failure],
    ) -> None:
        """Offer a group to the writer."""

        def make() -> DroppedGroup:
            # failed episodes first, then the others, with rows as long as they fit
            room = Room()
            made: list[DroppedEpisode] = []
            for number, (error, call) in sorted(failed.items()):
                made.append(room.episode(number, [_row_of(*call)] if call is not None else [], None, None, error))
            for number, episode in sorted(episodes.items()):
                made.append(room.episode(number, episode.rows, episode.reward, episode.correct))
            return DroppedGroup(
                time=time.time(),
                ticket=ticket,
                worker=self._writer.process,
                reason=reason[:MOST_TEXT],
                prompt=prompt.text[:MOST_TEXT],
                reference=prompt.answer[:MOST_TEXT],
                episodes=made,
            )

        self._writer.offer(make, failed=bool(failed))


def _row_of(before: Sequence[int], completion: Completion) -> Row:
    """Return a call of the engine as a row."""
    tokens = np.concatenate([np.asarray(before, np.int32), completion.tokens])
    mask = np.zeros(len(tokens), np.bool_)
    mask[len(before) :] = True
    return Row(tokens, mask, completion.logprobs, completion.versions, completion.finish_reason)

"""Dropped and failed groups of a RolloutWorker, as people see them later (``realsys.storage.dropped_groups``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from realsys.data.prompts import Prompt
from realsys.generation.client import Generated
from realsys.storage.dropped_groups import MOST_TEXT, DroppedEpisode, DroppedGroup, DroppedWriter, Room
from realsys.types import Episode, Row, Ticket

#: error of an episode, and its last call of the engine: the tokens before it, and the completion
Failure = tuple[str, tuple[Sequence[int], Generated] | None]


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
            return DroppedGroup(
                time=time.time(),
                ticket=ticket,
                worker=self._writer.process,
                reason=reason[:MOST_TEXT],
                prompt=prompt.text[:MOST_TEXT],
                reference=prompt.answer[:MOST_TEXT],
                episodes=_episodes(episodes, failed),
            )

        self._writer.offer(make, failed=bool(failed))


def _episodes(episodes: Mapping[int, Episode], failed: Mapping[int, Failure]) -> list[DroppedEpisode]:
    """Return the failed episodes, then the others, with rows as long as they fit."""
    room = Room()
    made: list[DroppedEpisode] = []
    for number, (error, call) in sorted(failed.items()):
        made.append(room.episode(number, [_row_of(*call)] if call is not None else [], None, None, error))
    for number, episode in sorted(episodes.items()):
        made.append(room.episode(number, episode.rows, episode.reward, episode.correct))
    return made


def _row_of(before: Sequence[int], completion: Generated) -> Row:
    """Return a call of the engine as a row."""
    tokens = np.concatenate([np.asarray(before, np.int32), completion.tokens])
    mask = np.zeros(len(tokens), np.bool_)
    mask[len(before) :] = True
    return Row(tokens, mask, completion.logprobs, completion.versions, completion.finish_reason)

"""Groups that the master dropped because they were too old, as people see them later.

    master ──keep_dropped──> TooOldGroups ──offer──> DroppedWriter ──thread──> file
           ──clear─────────> DataManager

The request loop copies at most ``MOST_GROUP_BYTES`` of rows, once per second; a thread writes them
(``realsys.storage.dropped_groups``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from realsys.model_calls import Empty, KeepDroppedRequest
from realsys.storage.dropped_groups import DroppedEpisode, DroppedGroup, DroppedWriter, Room
from realsys.train.data_manager import Array, DataManager
from realsys.types import GroupOrigin, Row, SampleMeta


class TooOldGroups:
    """Handler of the request ``keep_dropped``."""

    def __init__(self, data: DataManager, writer: DroppedWriter) -> None:
        self._data = data
        self._writer = writer

    def keep(self, request: KeepDroppedRequest) -> Empty:
        """Offer a group to the writer. Rows that are not here are left out."""
        origin, arrays = self._data.find([sample.sample_id for sample in request.samples])
        if origin is not None:
            self._writer.offer(lambda: _group(request, origin, arrays))
        return Empty()


def _group(request: KeepDroppedRequest, origin: GroupOrigin, arrays: Mapping[str, Mapping[str, Array]]) -> DroppedGroup:
    room = Room()
    held = [sample for sample in request.samples if sample.sample_id in arrays]
    held.sort(key=lambda sample: (sample.episode, sample.row))
    episodes = [
        _episode(room, list(samples), origin, arrays) for _, samples in groupby(held, lambda sample: sample.episode)
    ]
    return DroppedGroup(
        time=time.time(),
        ticket=origin.ticket,
        worker=origin.worker,
        reason=request.reason,
        prompt="",
        reference=None,
        episodes=episodes,
        next_version=request.next_version,
    )


def _episode(
    room: Room, samples: Sequence[SampleMeta], origin: GroupOrigin, arrays: Mapping[str, Mapping[str, Array]]
) -> DroppedEpisode:
    first = samples[0]
    rows = [
        Row(
            arrays[sample.sample_id]["tokens"],
            arrays[sample.sample_id]["loss_mask"],
            arrays[sample.sample_id]["behav_logprobs"],
            arrays[sample.sample_id]["versions"],
            origin.episodes[sample.episode][sample.row].finish_reason,
        )
        for sample in samples
    ]
    return room.episode(first.episode, rows, first.reward, first.correct)

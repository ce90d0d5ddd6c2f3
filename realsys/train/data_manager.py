"""The tensors of samples that this ModelWorker holds, by sample id and key, whichever of its roles made or reads them.

Filled by the I/O thread (groups from rollout) and the request loop (demos, transfers, results); the keys, their dtypes
and what they span are ``realsys.types.ARRAY_KEYS``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.errors import StreamError
from realsys.types import (
    ARRAY_KEYS,
    Group,
    GroupOrigin,
    Row,
    RowOrigin,
    SampleMeta,
    SamplesArrived,
    SequenceRef,
)

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


class DataManager:
    """Thread-safe. Holds an array until the master clears its sample, or its key of it; nothing else frees it.

    What ``hold`` names is kept beside that until ``release``, for the record of the step.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._samples: dict[str, dict[str, Array]] = {}
        self._origins: dict[str, GroupOrigin] = {}  # by the id of any sample of the group
        self._held: dict[tuple[str, str], Array | None] = {}  # (sample id, key)
        #: incarnation of the training side whose tickets are trained here; set before the first of them is granted
        self.trainer_incarnation = ""
        self.refused = 0  # groups of another one, since the start
        self.vocabulary = 0  # tokens that the actor knows; 0: not known yet
        self.row_limit = 0  # tokens of the longest row that can be trained; 0: not known yet
        self.episode_limit = 0  # tokens of an episode's rows, for a loss that needs them together; 0: no limit
        self.token_rewards = False  # whether the dataflow reads them
        self._warned = False

    def put(self, sample_id: str, arrays: Mapping[str, Array]) -> None:
        """Store or add to a sample. Raises KeyError for an unknown key."""
        checked = {key: np.ascontiguousarray(array, dtype=ARRAY_KEYS[key][0]) for key, array in arrays.items()}
        with self._lock:
            self._samples.setdefault(sample_id, {}).update(checked)
            for key in checked:
                if (sample_id, key) in self._held:
                    self._held[sample_id, key] = checked[key]

    def get(self, sample_id: str, key: str) -> Array:
        """Raises KeyError saying which worker lacks what."""
        with self._lock:
            sample = self._samples.get(sample_id)
            if sample is None or key not in sample:
                held = "the sample is not here" if sample is None else f"it has {', '.join(sorted(sample))}"
                raise KeyError(f"model_worker/{self._worker} has no {key} of sample {sample_id}: {held}")
            return sample[key]

    def has(self, sample_id: str, key: str) -> bool:
        with self._lock:
            return key in self._samples.get(sample_id, ())

    def clear(self, sample_ids: Iterable[str], keys: Collection[str] = ()) -> None:
        """Forget samples, or with ``keys`` only these arrays of them. What is held elsewhere is no error."""
        with self._lock:
            for sample_id in sample_ids:
                sample = self._samples.get(sample_id, {})
                for key in keys:
                    sample.pop(key, None)
                if not keys or not sample:
                    self._samples.pop(sample_id, None)
                    self._origins.pop(sample_id, None)

    def hold(self, wanted: Mapping[str, Iterable[str]]) -> list[GroupOrigin]:
        """Keep these arrays (key -> sample ids), those here and those to come. The origins of the groups among them.

        Replaces what was held before.
        """
        origins: dict[str, GroupOrigin] = {}
        with self._lock:
            self._held.clear()
            for key, sample_ids in wanted.items():
                for sample_id in sample_ids:
                    self._held[sample_id, key] = self._samples.get(sample_id, {}).get(key)
                    if origin := self._origins.get(sample_id):
                        origins[origin.ticket.ticket_id] = origin
        return list(origins.values())

    def release(self) -> dict[tuple[str, str], Array]:
        """What was held, by sample id and key, in the order in which it was asked for; nothing is held any more."""
        with self._lock:
            held, self._held = self._held, {}
        return {item: array for item, array in held.items() if array is not None}

    def __len__(self) -> int:
        with self._lock:
            return len(self._samples)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(array.nbytes for sample in self._samples.values() for array in sample.values())

    def add_group(self, group: Group) -> SamplesArrived | None:
        """Store a group from rollout; what to tell the master, or None if it is not wanted: its samples are here
        already, or its ticket was granted under an earlier training side and is issued again.

        Raises StreamError for a group that cannot be trained (``_check_group``).

        A ticket issued twice may arrive twice. Each attempt has sample ids of its own, so neither stands in the way of
        the other, whatever is being trained: the master chooses one, and clears the other.
        """
        now = time.time()
        ticket = group.ticket
        if ticket.trainer_incarnation != self.trainer_incarnation:
            self.refused += 1
            log.info(
                "refused ticket %s attempt %d of training side %r, this is %r",
                ticket.ticket_id,
                ticket.attempt,
                ticket.trainer_incarnation,
                self.trainer_incarnation,
            )
            return None
        self._check_group(group)
        entries: dict[str, dict[str, Array]] = {}
        metas: list[SampleMeta] = []
        group_rows = sum(len(episode.rows) for episode in group.episodes)
        for k, episode in enumerate(group.episodes):
            truncated, episode_tokens = episode.truncated, episode.loss_tokens  # both look at all its rows
            for r, row in enumerate(episode.rows):
                sample_id = f"{ticket.ticket_id}.{ticket.attempt}/{k}.{r}"
                version_min, version_max = row.version_span or (ticket.version, ticket.version)
                entries[sample_id] = self._arrays(row)
                metas.append(
                    SampleMeta(
                        sample_id=sample_id,
                        ticket_id=ticket.ticket_id,
                        attempt=ticket.attempt,
                        length=len(row.tokens),
                        loss_tokens=row.loss_tokens,
                        reward=episode.reward,
                        truncated=truncated,
                        version_min=version_min,
                        version_max=version_max,
                        owner=self._worker,
                        arrived=now,
                        trainer_incarnation=ticket.trainer_incarnation,
                        episode=k,
                        row=r,
                        group_rows=group_rows,
                        row_truncated=row.truncated,
                        episode_tokens=episode_tokens,
                        correct=episode.correct,
                        metrics=episode.metrics,
                    )
                )
        rows = [[RowOrigin(row.finish_reason, row.route, row.rewards) for row in e.rows] for e in group.episodes]
        origin = GroupOrigin(ticket, group.worker, group.started, group.finished, group.extra, rows, group.errors)
        with self._lock:
            if any(sample_id in self._samples for sample_id in entries):
                return None
            self._samples.update(entries)
            self._origins.update(dict.fromkeys(entries, origin))
        return SamplesArrived(metas)

    def _arrays(self, row: Row) -> dict[str, Array]:
        """Copy a row's arrays: they are views into one received frame, which a single long row would keep alive."""
        arrays: dict[str, Array] = {
            "tokens": np.array(row.tokens, dtype=np.int32),
            "loss_mask": np.array(row.loss_mask, dtype=np.bool_),
            "behav_logprobs": np.array(row.logprobs, dtype=np.float32),
            "versions": np.array(row.versions, dtype=np.int32),
        }
        if self.token_rewards:
            at_tokens = np.zeros(len(row.tokens), np.float32)
            for position, reward in row.rewards:
                at_tokens[position] = reward
            arrays["token_rewards"] = at_tokens[row.loss_mask]
        elif row.rewards and not self._warned:
            self._warned = True
            log.warning("rewards of single tokens arrive and are not trained on: set train.ppo.turn_rewards=true")
        return arrays

    def _check_group(self, group: Group) -> None:
        """Refuse a group that would end the trainer.

        Raises StreamError for a token without an embedding, and for a row that fits into no micro-batch.
        """
        rows = [row for episode in group.episodes for row in episode.rows]
        highest = max(int(row.tokens.max()) for row in rows)
        what = f"model_worker/{self._worker}: group {group.ticket.ticket_id} of {group.worker}"
        if highest >= self.vocabulary > 0:
            raise StreamError(f"{what} has token {highest}, the actor's vocabulary has {self.vocabulary}")
        longest = max(len(row.tokens) for row in rows)
        if longest > self.row_limit > 0:
            raise StreamError(f"{what} has a row of {longest} tokens, train.microbatch_tokens is {self.row_limit}")
        most = max(sum(len(row.tokens) for row in episode.rows) for episode in group.episodes)
        if most > self.episode_limit > 0:
            raise StreamError(
                f"{what} has an episode of {most} tokens; train.ppo.loss takes ratios of whole episodes, "
                f"which must fit into train.microbatch_tokens ({self.episode_limit})"
            )

    def add_sequence(self, sample_id: str, prompt: list[int], response: list[int]) -> SampleMeta:
        """Store one demonstration."""
        tokens = np.array(prompt + response, dtype=np.int32)
        self.put(sample_id, {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)})
        return SampleMeta(
            sample_id=sample_id,
            ticket_id=sample_id,
            attempt=0,
            length=len(tokens),
            loss_tokens=len(response),
            reward=0.0,
            truncated=False,
            version_min=0,
            version_max=0,
            owner=self._worker,
            arrived=time.time(),
        )


def array_size(ref: SequenceRef, key: str) -> int:
    """Elements of ``key`` of this sequence."""
    return {"sequence": ref.length, "loss": ref.loss_tokens, "loss_and_end": ref.loss_tokens + 1}[ARRAY_KEYS[key][1]]

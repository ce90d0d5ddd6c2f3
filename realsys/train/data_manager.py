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
    AnswerOrigin,
    GroupOrigin,
    SampleMeta,
    SamplesArrived,
    SequenceRef,
    TrajectoryGroup,
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
        self.training = ""
        self.refused = 0  # groups of another one, since the start
        self.vocabulary = 0  # tokens that the actor knows; 0: not known yet

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

    def add_group(self, group: TrajectoryGroup) -> SamplesArrived | None:
        """Store a group from rollout; what to tell the master, or None if it is not wanted: its samples are here
        already, or its ticket was granted under an earlier training side and is issued again.

        Raises StreamError for tokens that the actor does not know.

        A ticket issued twice may arrive twice. Each attempt has sample ids of its own, so neither stands in the way of
        the other, whatever is being trained: the master chooses one, and clears the other.
        """
        now = time.time()
        ticket = group.ticket
        if ticket.training != self.training:
            self.refused += 1
            log.info(
                "refused ticket %s attempt %d of training side %r, this is %r",
                ticket.ticket_id,
                ticket.attempt,
                ticket.training,
                self.training,
            )
            return None
        self._check_tokens(group)
        metas = []
        entries: dict[str, dict[str, Array]] = {}
        for k, trajectory in enumerate(group.trajectories):
            sample_id = f"{ticket.ticket_id}.{ticket.attempt}/{k}"
            # Copies: the arrays are views into one received frame, which a single long answer would keep alive.
            entries[sample_id] = {
                "tokens": np.array(trajectory.tokens, dtype=np.int32),
                "behav_logprobs": np.array(trajectory.logprobs, dtype=np.float32),
                "versions": np.array(trajectory.versions, dtype=np.int32),
            }
            metas.append(
                SampleMeta(
                    sample_id=sample_id,
                    ticket_id=ticket.ticket_id,
                    attempt=ticket.attempt,
                    length=len(trajectory.tokens),
                    prompt_len=trajectory.prompt_len,
                    reward=trajectory.reward,
                    truncated=trajectory.truncated,
                    version_min=int(trajectory.versions.min()) if trajectory.answer_len else ticket.version,
                    version_max=int(trajectory.versions.max()) if trajectory.answer_len else ticket.version,
                    owner=self._worker,
                    arrived=now,
                    training=ticket.training,
                )
            )
        answers = [AnswerOrigin(t.finish_reason, t.route) for t in group.trajectories]
        origin = GroupOrigin(ticket, group.worker, group.started, group.finished, group.extra, answers)
        with self._lock:
            if any(sample_id in self._samples for sample_id in entries):
                return None
            self._samples.update(entries)
            self._origins.update(dict.fromkeys(entries, origin))
        return SamplesArrived(metas)

    def _check_tokens(self, group: TrajectoryGroup) -> None:
        """Raises StreamError for a token that the actor has no embedding of: it would end the training side."""
        highest = max(int(trajectory.tokens.max()) for trajectory in group.trajectories)
        if highest >= self.vocabulary > 0:
            raise StreamError(
                f"model_worker/{self._worker}: group {group.ticket.ticket_id} of {group.worker} has token {highest}, "
                f"the actor's vocabulary has {self.vocabulary}"
            )

    def add_sequence(self, sample_id: str, prompt: list[int], response: list[int]) -> SampleMeta:
        """Store one demonstration."""
        self.put(sample_id, {"tokens": np.array(prompt + response, dtype=np.int32)})
        return SampleMeta(
            sample_id=sample_id,
            ticket_id=sample_id,
            attempt=0,
            length=len(prompt) + len(response),
            prompt_len=len(prompt),
            reward=0.0,
            truncated=False,
            version_min=0,
            version_max=0,
            owner=self._worker,
            arrived=time.time(),
        )


def array_size(ref: SequenceRef, key: str) -> int:
    """Elements of ``key`` of this sequence."""
    return {"sequence": ref.length, "answer": ref.answer_len, "answer_and_end": ref.answer_len + 1}[ARRAY_KEYS[key][1]]

"""The arrays of samples on this ModelWorker, by sample id and key, for all of its roles.

The I/O thread (groups from rollout) and the request loop (demonstrations, transfers, results) fill
it. The keys, their dtypes and extents are ``realsys.types.ARRAY_KEYS``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.config.dataflow import KV_VERSIONS, TEACHER_LOGPROBS, TEACHER_TOKENS, TEMPERATURES
from realsys.data.learning import LearningRow
from realsys.errors import StreamError
from realsys.model_calls import SamplesArrived
from realsys.observe import spans
from realsys.train.requests import ClientRows
from realsys.types import ARRAY_KEYS, F32, I32, Group, GroupOrigin, Mask, Row, RowOrigin, SampleMeta, SequenceRef

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]


class DataManager:
    """The store of the worker's arrays. Thread-safe.

    It keeps an array until the master clears its sample or its key. Arrays that ``hold`` names are
    also kept until ``release``, for the record of the step.
    """

    def __init__(self, worker: int, top_k: int = 0) -> None:
        """``top_k``: entries of an array for each loss token, if its extent depends on it."""
        self._worker = worker
        self.top_k = top_k
        self._lock = threading.Lock()
        self._samples: dict[str, dict[str, Array]] = {}
        self._origins: dict[str, GroupOrigin] = {}  # sample id -> origin of its group
        self._held: dict[tuple[str, str], Array | None] = {}  # (sample id, key)
        #: incarnation of the trainer whose tickets are accepted; set before the first of them is
        #: granted
        self.trainer_incarnation = ""
        self.refused = 0  # groups of another trainer, since the start
        self.vocabulary = 0  # tokens of the actor's vocabulary; 0: not known yet
        self.row_limit = 0  # tokens of the longest row that can be trained; 0: not known yet
        self.episode_limit = 0  # tokens of an episode, for a loss that needs all its rows in one micro-batch; 0: none
        self.token_rewards = False  # True if the dataflow reads rewards of single tokens
        self.teacher = False  # True if the dataflow reads a teacher's tokens, which rows bring
        self.kv_versions = False  # True if the dataflow reads the versions of keys
        self.temperature = 0.0  # temperature of the trial; 0 if the dataflow does not read temperatures of tokens
        self._warned = False

    def put(self, sample_id: str, arrays: Mapping[str, Array]) -> None:
        """Store arrays of a sample, new or not. Raises KeyError for an unknown key."""
        checked = {key: np.ascontiguousarray(array, dtype=ARRAY_KEYS[key][0]) for key, array in arrays.items()}
        with self._lock:
            self._samples.setdefault(sample_id, {}).update(checked)
            for key in checked:
                if (sample_id, key) in self._held:
                    self._held[sample_id, key] = checked[key]

    def get(self, sample_id: str, key: str) -> Array:
        """Return an array. Raises KeyError with worker, key and sample if it is not here."""
        with self._lock:
            sample = self._samples.get(sample_id)
            if sample is None or key not in sample:
                held = "the sample is unknown" if sample is None else f"it has {', '.join(sorted(sample))}"
                raise KeyError(f"model_worker/{self._worker} has no {key} of sample {sample_id}: {held}")
            return sample[key]

    def has(self, sample_id: str, key: str) -> bool:
        with self._lock:
            return key in self._samples.get(sample_id, ())

    def find(self, sample_ids: Collection[str]) -> tuple[GroupOrigin | None, dict[str, dict[str, Array]]]:
        """Return the origin of the group of these samples, if it is known, and the arrays of those that are here."""
        with self._lock:
            arrays = {name: dict(self._samples[name]) for name in sample_ids if name in self._samples}
            return next((self._origins[name] for name in arrays if name in self._origins), None), arrays

    def clear(self, sample_ids: Iterable[str], keys: Collection[str] = ()) -> None:
        """Discard samples, or with ``keys`` only these arrays of them.

        A sample that is not here is not an error.
        """
        with self._lock:
            for sample_id in sample_ids:
                sample = self._samples.get(sample_id, {})
                for key in keys:
                    sample.pop(key, None)
                if not keys or not sample:
                    self._samples.pop(sample_id, None)
                    self._origins.pop(sample_id, None)

    def mask_older(self, sample_ids: Iterable[str], oldest: int) -> None:
        """Take the tokens of versions below ``oldest`` out of the loss of these samples (``without_older``).

        Their origins stay as they arrived. Raises KeyError for a sample that is not here.
        """
        with self._lock:
            for sample_id in sample_ids:
                self._samples[sample_id] = without_older(self._samples[sample_id], oldest)

    def hold(self, arrays: Mapping[str, Iterable[str]]) -> list[GroupOrigin]:
        """Keep these arrays (key -> sample ids), including those stored later; return the origins
        of their groups.

        The arrays of an earlier call are no longer kept.
        """
        items = [(sample_id, key) for key, sample_ids in arrays.items() for sample_id in sample_ids]
        with self._lock:
            # None for an array that a call of this step will store: ``put`` fills it in.
            self._held = {item: self._samples.get(item[0], {}).get(item[1]) for item in items}
            origins = [self._origins[sample_id] for sample_id, _ in items if sample_id in self._origins]
        return list({origin.ticket.ticket_id: origin for origin in origins}.values())

    def release(self) -> dict[tuple[str, str], Array]:
        """Return the held arrays by sample id and key, in the order of ``hold``; stop holding them."""
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
        """Store a group from rollout; return the notice for the master, or None if the group is
        refused.

        Refused are a group whose samples are already here, and one whose ticket was granted under
        an earlier trainer: that ticket is reissued. Raises StreamError for a group that cannot be
        trained (``_check_group``).

        A reissued ticket may arrive twice. The attempts have different sample ids, so both are
        stored; the master chooses one and clears the other.
        """
        ticket = group.ticket
        if ticket.trainer_incarnation != self.trainer_incarnation:
            self.refused += 1
            own, other = self.trainer_incarnation, ticket.trainer_incarnation
            log.info("refused ticket %s of trainer %r, this is %r", ticket.unit, other, own)
            return None
        self._check_group(group)
        metas = self._metadata(group)
        rows = [row for episode in group.episodes for row in episode.rows]
        entries = {meta.sample_id: self._arrays(row) for meta, row in zip(metas, rows, strict=True)}
        origins = [[RowOrigin(row.finish_reason, row.route, row.rewards) for row in e.rows] for e in group.episodes]
        origin = GroupOrigin(ticket, group.worker, group.started, group.finished, group.extra, origins, group.errors)
        # Checked and stored under one lock: the same group may arrive on two connections at the
        # same time.
        with self._lock:
            if any(sample_id in self._samples for sample_id in entries):
                return None
            self._samples.update(entries)
            self._origins.update(dict.fromkeys(entries, origin))
        spans.mark("receive", ticket.unit, rows=len(metas))
        return SamplesArrived(metas)

    def _metadata(self, group: Group) -> list[SampleMeta]:
        """Return the metadata of the group's rows, episode by episode."""
        now = time.time()
        ticket = group.ticket
        metas: list[SampleMeta] = []
        group_rows = sum(len(episode.rows) for episode in group.episodes)
        shared = iter(shared_beginnings([row.tokens for episode in group.episodes for row in episode.rows]))
        for k, episode in enumerate(group.episodes):
            # Computed once per episode: both read all of its rows.
            truncated = episode.truncated
            episode_tokens = episode.loss_tokens
            for r, row in enumerate(episode.rows):
                # A row without loss tokens has no version. The version of the ticket keeps it from
                # being counted as stale.
                version_min, version_max = row.version_span or (ticket.version, ticket.version)
                metas.append(
                    SampleMeta(
                        sample_id=f"{ticket.ticket_id}.{ticket.attempt}/{k}.{r}",
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
                        version_tokens=version_tokens(row.versions) if version_min < version_max else [],
                        reissues=ticket.reissues,
                        kept_tokens=row.kept_tokens,
                        shared=next(shared),
                    )
                )
        return metas

    def _arrays(self, row: Row) -> dict[str, Array]:
        """Copy a row's arrays.

        They are views into one received frame, which a single long row would keep in memory.
        """
        arrays: dict[str, Array] = {
            "tokens": np.array(row.tokens, dtype=np.int32),
            "loss_mask": np.array(row.loss_mask, dtype=np.bool_),
            "behav_logprobs": np.array(row.logprobs, dtype=np.float32),
            "versions": np.array(row.versions, dtype=np.int32),
        }
        if self.kv_versions:
            arrays[KV_VERSIONS] = np.array(row.versions if row.kv_versions is None else row.kv_versions, dtype=np.int32)
        if self.temperature:
            runs = row.temperatures or ((0.0, row.loss_tokens),)
            each, counts = zip(*((own or self.temperature, count) for own, count in runs), strict=True)
            arrays[TEMPERATURES] = np.repeat(np.array(each, np.float32), counts)
        if self.teacher:
            tokens, logprobs = row.teacher or (np.zeros(0), np.zeros(0))  # without loss tokens
            arrays[TEACHER_TOKENS] = np.array(tokens, dtype=np.int32).ravel()
            arrays[TEACHER_LOGPROBS] = np.array(logprobs, dtype=np.float32).ravel()
        if self.token_rewards:
            at_tokens = np.zeros(len(row.tokens), np.float32)
            for position, reward in row.rewards:
                at_tokens[position] = reward
            arrays["token_rewards"] = at_tokens[row.loss_mask]
        elif row.rewards and not self._warned:
            self._warned = True
            log.warning("rewards of single tokens arrive but are not trained on: set train.ppo.turn_rewards=true")
        return arrays

    def _check_group(self, group: Group) -> None:
        """Check a group for rows that would end the trainer. Raises StreamError.

        A token must have an embedding, a row must fit into a micro-batch, and so must an episode if
        the loss needs it whole.
        """
        group_name = f"model_worker/{self._worker}: group {group.ticket.ticket_id} of {group.worker}"
        self._check_rows(group_name, [row.tokens for episode in group.episodes for row in episode.rows])
        for row in (row for episode in group.episodes for row in episode.rows if self.teacher and row.loss_tokens):
            if (have := 0 if row.teacher is None else row.teacher[0].shape[1]) != self.top_k:
                problem = f"has {have} tokens of a teacher at each loss token, but train.ppo.loss reads {self.top_k}"
                raise StreamError(f"{group_name} {problem}: rollout.agent must set Row.teacher")
        most = max(sum(len(row.tokens) for row in episode.rows) for episode in group.episodes)
        if most > self.episode_limit > 0:
            raise StreamError(
                f"{group_name} has an episode of {most} tokens; train.ppo.loss takes ratios of whole episodes, "
                f"which must fit into train.microbatch_tokens ({self.episode_limit}): increase it"
            )

    def _check_rows(self, name: str, rows: Sequence[I32]) -> None:
        highest = max(int(tokens.max()) for tokens in rows)
        if highest >= self.vocabulary > 0:
            raise StreamError(
                f"{name} has token {highest}, but the actor's vocabulary has {self.vocabulary} tokens: "
                "servers and actor must load the same model"
            )
        longest = max(len(tokens) for tokens in rows)
        if longest > self.row_limit > 0:
            raise StreamError(
                f"{name} has a row of {longest} tokens, but train.microbatch_tokens is {self.row_limit}: increase it"
            )

    def add_rows(self, rows: ClientRows) -> list[SampleMeta]:
        """Store rows of a client, and return their metadata in the order of ``rows``: each has a ticket of its own.

        In one group they share beginnings. Raises StreamError for rows that would end the trainer; the service
        has refused them before.
        """
        names = list(rows.tokens)
        tokens = [np.frombuffer(rows.tokens[name], np.int32) for name in names]
        for name, own in zip(names, tokens, strict=True):
            self._check_rows(f"model_worker/{self._worker}: row {name} of a client", [own])
        columns = {"loss_mask": rows.loss_mask, "behav_logprobs": rows.logprobs, "advantages": rows.advantages}
        metas = []
        for name, own, shared in zip(names, tokens, shared_beginnings(tokens), strict=True):
            arrays = {key: np.frombuffer(column[name], ARRAY_KEYS[key][0]) for key, column in columns.items()}
            # Copies: the arrays are views of a message, and cannot be written.
            self.put(name, {key: array.copy() for key, array in {"tokens": own, **arrays}.items()})
            meta = SampleMeta(
                sample_id=name,
                ticket_id=name,
                attempt=0,
                length=len(own),
                loss_tokens=int(arrays["loss_mask"].sum()),
                reward=0.0,
                truncated=False,
                version_min=0,
                version_max=0,
                owner=self._worker,
                arrived=time.time(),
                shared=shared,
            )
            metas.append(meta)
        return metas

    def add_learned(self, ticket_id: str, rows: Sequence[LearningRow]) -> list[SampleMeta]:
        """Store the rows of one line of ``data.demos`` as an episode, and return their metadata."""
        loss_tokens = [sum(row.loss_mask) for row in rows]
        metas = []
        for number, row in enumerate(rows):
            sample_id = f"{ticket_id}/0.{number}"
            tokens, mask = np.array(row.tokens, dtype=np.int32), np.array(row.loss_mask, dtype=bool)
            self.put(sample_id, {"tokens": tokens, "loss_mask": mask})
            meta = SampleMeta(
                sample_id=sample_id,
                ticket_id=ticket_id,
                attempt=0,
                length=len(tokens),
                loss_tokens=loss_tokens[number],
                reward=0.0,
                truncated=False,
                version_min=0,
                version_max=0,
                owner=self._worker,
                arrived=time.time(),
                row=number,
                group_rows=len(rows),
                episode_tokens=sum(loss_tokens),
            )
            metas.append(meta)
        return metas


def array_size(ref: SequenceRef, key: str, top_k: int = 0) -> int:
    """Return the number of elements of the array ``key`` of this sequence; ``top_k``: ``DataManager.top_k``."""
    tokens = ref.loss_tokens
    elements = {"sequence": ref.length, "loss": tokens, "loss_and_end": tokens + 1, "top_k": tokens * top_k}
    return elements[ARRAY_KEYS[key][1]]


# ---- tokens of a row by version, and a row's arrays without the tokens that are too old


def version_tokens(versions: I32) -> list[tuple[int, int]]:
    """Return (version, tokens) of the loss tokens of a row, oldest first; empty for a row of at most one version."""
    numbers, counts = np.unique(versions, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True)) if len(numbers) > 1 else []


def without_older(arrays: Mapping[str, Array], oldest: int) -> dict[str, Array]:
    """Return a row's arrays with the tokens of versions below ``oldest`` out of the loss; they stay in the context.

    The reward of a token that leaves goes to the loss token before it. Without one it is lost, because it
    follows no token that is left.
    """
    kept = arrays["versions"] >= oldest
    masked = {
        # as many entries for each token as the array has
        key: array[kept.repeat(array.size // max(1, len(kept)))] if ARRAY_KEYS[key][1] in ("loss", "top_k") else array
        for key, array in arrays.items()
    }
    masked["loss_mask"] = arrays["loss_mask"].copy()
    masked["loss_mask"][arrays["loss_mask"]] = kept
    if "token_rewards" in arrays:
        masked["token_rewards"] = _moved_rewards(arrays["token_rewards"], kept)
    return masked


def _moved_rewards(rewards: F32, kept: Mask) -> F32:
    place = np.cumsum(kept) - 1  # index of the token, or of the kept one before it; -1: none
    moved = np.zeros(int(kept.sum()), np.float32)
    np.add.at(moved, place[place >= 0], rewards[place >= 0])
    return moved

"""The replay buffer of the master: the groups that have arrived, and the choice of the next batch. Metadata only.

    notices ──add──> incomplete ──(all of its rows)─────> ready ──take──> in training ──(next take)──> remembered
              ├─> rejected (a copy)       │                 │   <─release─┘  └─release─> excluded ─────┤
              │                           │                 └───take──> dropped (all tokens masked) ───┤
              └─────────add───────────────┴─────> reissued (``too_old``): a later attempt may come ────┘

``add`` *consumes* the notices of the stream, in any order and possibly twice. ``take`` *waits for* nothing: it returns
no groups while too few are ready. Results name in ``clear`` the samples that their owners may discard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from realsys.algorithm.token_losses import COPY, MASKED, STALE, mask_group
from realsys.types import SampleMeta

StalePolicy = Literal["train", "mask", "drop"]
#: Returns True if a complete group is too old, and its ticket is to be issued again.
TooOld = Callable[[Sequence[SampleMeta]], str]
_FINAL = 1 << 62  # above every attempt


@dataclass(slots=True)
class Added:
    """Result of ``add``.

    accepted, rejected  numbers of samples
    dropped             (ticket_id, reason) of groups that were complete and can never be trained
    stale               (ticket_id, attempt) of groups that were complete and too old
    clear               samples that will not be trained: their owners may discard them
    lost                (reason, samples): the samples whose tokens are lost
    """

    accepted: int = 0
    rejected: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    stale: list[tuple[str, int]] = field(default_factory=list)
    clear: list[SampleMeta] = field(default_factory=list)
    lost: list[tuple[str, list[SampleMeta]]] = field(default_factory=list)

    def lose(self, reason: str, samples: list[SampleMeta]) -> None:
        """Add samples that will not be trained and may be discarded."""
        self.lost.append((reason, samples))
        self.clear.extend(samples)


@dataclass(slots=True)
class Batch:
    """Groups of one train step, oldest ticket first, and the groups that were dropped before it.

    ``groups`` are the rows as they are trained, after masking; it is empty if too few groups remain after
    drops, and they then stay in the buffer. ``sampled`` are all rows of these groups as they arrived.
    """

    groups: list[list[SampleMeta]] = field(default_factory=list)
    sampled: list[SampleMeta] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)  # (ticket_id, reason)
    clear: list[SampleMeta] = field(default_factory=list)
    lost: list[tuple[str, list[SampleMeta]]] = field(default_factory=list)  # (reason, samples)

    @property
    def masked(self) -> list[SampleMeta]:
        """Return the rows that are trained without some of their tokens."""
        before = {sample.sample_id: sample.loss_tokens for sample in self.sampled}
        return [row for group in self.groups for row in group if row.loss_tokens < before[row.sample_id]]

    @property
    def unused(self) -> list[SampleMeta]:
        """Return the rows of its groups that are not trained, because all their tokens are too old."""
        trained = {row.sample_id for group in self.groups for row in group}
        return [sample for sample in self.sampled if sample.sample_id not in trained]


@dataclass(slots=True)
class _Group:
    """Rows of one attempt of a ticket, by sample id."""

    attempt: int
    samples: dict[str, SampleMeta] = field(default_factory=dict)

    def ordered(self) -> list[SampleMeta]:
        """Return the samples, sorted by episode, then row."""
        return sorted(self.samples.values(), key=lambda s: (s.episode, s.row))


class SequenceBuffer:
    """Buffer of groups by ticket. Each ticket leaves it at most once.

    Each sample names the number of rows of its group (``group_rows``); a group with all of them is
    complete. ``too_old`` returns why a complete group leaves when it arrives, or "": with STALE this attempt leaves,
    and a later one is accepted; with MASKED the ticket ends.

    latest-attempt  Until a ticket is in training, its latest attempt counts, because the ledger knows
                    only that one. It replaces an earlier attempt; a late sample of an earlier one is
                    rejected.
    one-end         A copy of a ticket that is in training, trained or dropped is rejected, of any
                    attempt. For the ledger both ends are final, and the place of a dropped ticket is
                    already taken by another one. Of a ticket that was too old, that attempt and earlier
                    ones are rejected.

    The buffer knows the last ``remember`` ended tickets; the ledger refuses a second claim of older ones.
    """

    def __init__(
        self,
        too_old: TooOld = lambda group: "",
        remember: int = 65536,
    ) -> None:
        if remember < 1:
            raise ValueError(f"SequenceBuffer: remember={remember} must be at least 1")
        self.rejected = 0  # samples, since the start
        self._too_old = too_old
        self._remember = remember
        self._incomplete: dict[str, _Group] = {}
        self._ready: dict[str, _Group] = {}
        self._training: dict[str, _Group] = {}
        self._deferred: list[SampleMeta] = []  # copies of samples in training
        # trained, dropped and reissued tickets, oldest first -> the last attempt that can be a copy
        self._ended: OrderedDict[str, int] = OrderedDict()

    @property
    def ready_groups(self) -> int:
        """Number of complete groups, too old ones included."""
        return len(self._ready)

    @property
    def incomplete_groups(self) -> int:
        return len(self._incomplete)

    def held(self) -> dict[str, int]:
        """Return ticket -> attempt of every complete group that is not in training.

        Incomplete groups are excluded: their missing samples may be lost, and the ledger must be free to
        reissue their tickets.
        """
        return {ticket: group.attempt for ticket, group in self._ready.items()}

    def ready_before(self, ticket_id: str) -> int:
        """Count the complete groups that ``take`` takes before that of ``ticket_id``."""
        return sum(other < ticket_id for other in self._ready)

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._ready or ticket_id in self._incomplete

    def add(self, samples: Iterable[SampleMeta]) -> Added:
        """Add samples, of complete groups or parts of them. A copy is rejected and counted; it never raises."""
        result = Added()
        for sample in samples:
            if self._accept(sample, result):
                result.accepted += 1
            else:
                result.rejected += 1
                self.rejected += 1
                result.lost.append((COPY, [sample]))
        return result

    def take(self, batch_groups: int, oldest: int | None = None) -> Batch:
        """Take the ``batch_groups`` oldest complete groups.

        With ``oldest``, the groups have no loss token of an older version (``mask_group``), and a group
        without any other leaves the buffer with reason ``masked``, even if the batch does not fill. The
        batch taken before counts as trained from here on.
        """
        batch = Batch(clear=self._settle())
        chosen: dict[str, list[SampleMeta]] = {}
        # Ids are zero-padded numbers, so their lexical order is the order of the grants.
        for ticket_id in sorted(self._ready):
            if len(chosen) == batch_groups:
                break
            group = self._ready[ticket_id].ordered()
            rows = group if oldest is None else mask_group(group, oldest)
            if rows:
                chosen[ticket_id] = rows
                continue
            del self._ready[ticket_id]
            batch.dropped.append((ticket_id, MASKED))
            batch.lost.append((MASKED, group))
            batch.clear.extend([*group, *self._part_of(ticket_id)])
            self._end(ticket_id)
        if len(chosen) < batch_groups:
            return batch
        for ticket_id, rows in chosen.items():
            taken = self._training[ticket_id] = self._ready.pop(ticket_id)
            self._deferred += self._part_of(ticket_id)
            batch.groups.append(rows)
            batch.sampled.extend(taken.ordered())
        return batch

    def release(self, excluded: Collection[str]) -> Added:
        """Undo ``take`` for a batch that is not trained. Call it before any sample of it is transferred.

        The tickets ``excluded`` end here and will not be trained; the others are ready again.
        """
        result = Added()
        copies = self._deferred
        taken = self._training
        self._training = {}
        self._deferred = []
        for ticket_id, group in taken.items():
            if ticket_id in excluded:
                result.lose(COPY, group.ordered())
                self._end(ticket_id)
            else:
                self._ready[ticket_id] = group
        for copy in copies:
            self._refuse(copy, taken[copy.ticket_id], result)
        return result

    def _accept(self, sample: SampleMeta, result: Added) -> bool:
        ticket_id = sample.ticket_id
        if ticket_id in self._training:
            # Not cleared before the step ends: the batch plan may have transferred the original to the
            # copy's worker, under the same sample id.
            self._deferred.append(sample)
            return False
        if sample.attempt <= self._ended.get(ticket_id, -1):
            result.clear.append(sample)
            return False
        ready = self._ready.get(ticket_id)
        if ready is not None and sample.attempt <= ready.attempt:
            self._refuse(sample, ready, result)
            return False
        group = self._incomplete.setdefault(ticket_id, _Group(sample.attempt))
        if sample.attempt < group.attempt or (sample.attempt == group.attempt and sample.sample_id in group.samples):
            self._refuse(sample, group, result)
            return False
        if sample.attempt > group.attempt:
            self._discard(group, result)
            group = self._incomplete[ticket_id] = _Group(sample.attempt)
        group.samples[sample.sample_id] = sample
        if len(group.samples) == sample.group_rows:
            self._complete(ticket_id, self._incomplete.pop(ticket_id), result)
        return True

    def _complete(self, ticket_id: str, group: _Group, result: Added) -> None:
        if older := self._ready.pop(ticket_id, None):
            self._discard(older, result)
        samples = group.ordered()
        if reason := self._too_old(samples):
            result.lose(reason, samples)
            if reason == STALE:
                result.stale.append((ticket_id, group.attempt))
                self._end(ticket_id, group.attempt)
            else:
                result.dropped.append((ticket_id, reason))
                self._end(ticket_id)
            return
        self._ready[ticket_id] = group

    def _refuse(self, copy: SampleMeta, held: _Group, result: Added) -> None:
        """Clear a copy, unless it is on the same worker as the original.

        Both have the same sample id there, so clearing the copy would clear the original.
        """
        original = held.samples.get(copy.sample_id)
        if original is None or original.owner != copy.owner:
            result.clear.append(copy)

    def _discard(self, older: _Group, result: Added) -> None:
        """Reject a group that a later attempt replaces; it is not in training."""
        result.rejected += len(older.samples)
        self.rejected += len(older.samples)
        result.lose(COPY, older.ordered())

    def _part_of(self, ticket_id: str) -> list[SampleMeta]:
        """Remove the incomplete later attempt of a ticket, which can no longer be trained; return its samples."""
        part = self._incomplete.pop(ticket_id, None)
        return part.ordered() if part else []

    def _settle(self) -> list[SampleMeta]:
        """End the tickets of the batch taken before; return the copies that may be cleared now."""
        for ticket_id in self._training:
            self._end(ticket_id)
        self._training.clear()
        copies = self._deferred
        self._deferred = []
        return copies

    def _end(self, ticket_id: str, attempt: int = _FINAL) -> None:
        self._ended[ticket_id] = attempt
        self._ended.move_to_end(ticket_id)
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)


def owners_of(groups: Sequence[Sequence[SampleMeta]]) -> dict[str, frozenset[int]]:
    """Return sample id -> the worker that received it, for ``plan_call``; one object for each worker."""
    owners = {sample.owner: frozenset([sample.owner]) for group in groups for sample in group}
    return {sample.sample_id: owners[sample.owner] for group in groups for sample in group}

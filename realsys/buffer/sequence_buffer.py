"""The replay buffer of the master: the groups that have arrived, and the choice of the next batch. Metadata only.

    notices ──add──> incomplete ──(all of its rows)─────> ready ──take──> in training ──(next take)──> remembered
              ├─> rejected (a copy)       │                 │   <─release─┘  └─release─> excluded ─────┤
              │                           │                 └───take──> dropped (too stale) ───────────┤
              └─────────add───────────────┴─────> dropped (not worth training: ``keep``) ──────────────┘

``add`` *consumes* the notices of the stream, in any order and possibly twice. ``take`` *waits for* nothing: it returns
no groups while too few are ready. Results name in ``clear`` the samples that their owners may discard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from realsys.types import SampleMeta

StalePolicy = Literal["drop", "train"]
#: reasons for which the buffer drops a group
STALE, SUCCESS_RATE = "stale", "success_rate"
#: Returns True if a complete group is worth training on.
Keep = Callable[[Sequence[SampleMeta]], bool]


@dataclass(slots=True)
class Added:
    """Result of ``add``.

    accepted, rejected  numbers of samples
    dropped             (ticket_id, reason) of groups that were complete and not worth training on
    clear               samples that will not be trained: their owners may discard them
    """

    accepted: int = 0
    rejected: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    clear: list[SampleMeta] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """Groups of one train step, oldest ticket first, and the groups that were dropped before it.

    ``groups`` is empty if too few groups remain after drops; they then stay in the buffer. ``stale``
    counts groups of this batch beyond the bound (policy ``train``). ``oldest_staleness`` and
    ``newest_staleness`` are histograms of the rows: versions that the oldest, or newest, token of a row
    is behind -> number of rows.
    """

    groups: list[list[SampleMeta]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)  # (ticket_id, reason)
    clear: list[SampleMeta] = field(default_factory=list)
    stale: int = 0
    oldest_staleness: dict[int, int] = field(default_factory=dict)
    newest_staleness: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """Rows of one attempt of a ticket, by sample id."""

    attempt: int
    samples: dict[str, SampleMeta] = field(default_factory=dict)

    def ordered(self) -> list[SampleMeta]:
        """Return the samples, sorted by episode, then row."""
        return sorted(self.samples.values(), key=lambda s: (s.episode, s.row))

    def oldest_version(self) -> int:
        return min(sample.version_min for sample in self.samples.values())


class SequenceBuffer:
    """Buffer of groups by ticket. Each ticket leaves it at most once.

    Each sample names the number of rows of its group (``group_rows``); a group with all of them is
    complete. A complete group that ``keep`` refuses leaves with reason ``success_rate``;
    ``filtered_in_a_row`` counts such groups since the last one that stayed.

    latest-attempt  Until a ticket is in training, its latest attempt counts, because the ledger knows
                    only that one. It replaces an earlier attempt; a late sample of an earlier one is
                    rejected.
    one-end         A copy of a ticket that is in training, trained or dropped is rejected, of any
                    attempt. For the ledger both ends are final, and the place of a dropped ticket is
                    already taken by another one.

    The buffer knows the last ``remember`` ended tickets; the ledger refuses a second claim of older ones.
    """

    def __init__(self, keep: Keep = lambda group: True, remember: int = 65536) -> None:
        if remember < 1:
            raise ValueError(f"SequenceBuffer: remember={remember} must be at least 1")
        self.rejected = 0  # samples, since the start
        self.filtered_in_a_row = 0  # groups
        self._keep = keep
        self._remember = remember
        self._incomplete: dict[str, _Group] = {}
        self._ready: dict[str, _Group] = {}
        self._training: dict[str, _Group] = {}
        self._deferred: list[SampleMeta] = []  # copies of samples in training
        self._ended: OrderedDict[str, None] = OrderedDict()  # trained and dropped tickets, oldest first

    @property
    def ready_groups(self) -> int:
        """Number of complete groups, stale ones included."""
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

    def fresh_groups(self, version: int, eta: int) -> int:
        """Count the complete groups that ``take`` would not drop under policy ``drop``."""
        return sum(version - group.oldest_version() <= eta for group in self._ready.values())

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
        return result

    def take(self, batch_groups: int, version: int, eta: int, stale_policy: StalePolicy) -> Batch:
        """Take the ``batch_groups`` oldest complete groups, for training on top of version ``version``.

        Under policy ``drop``, every complete group whose oldest token is more than ``eta`` versions behind
        leaves the buffer with reason ``stale``, even if the batch does not fill. The batch taken before
        counts as trained from here on.
        """
        batch = Batch(clear=self._settle())
        if stale_policy == "drop":
            self._drop_stale(version, eta, batch)
        if len(self._ready) < batch_groups:
            return batch
        # Ids are zero-padded numbers, so their lexical order is the order of the grants.
        for ticket_id in sorted(self._ready)[:batch_groups]:
            group = self._ready.pop(ticket_id)
            self._training[ticket_id] = group
            self._deferred += self._part_of(ticket_id)
            batch.groups.append(group.ordered())
            batch.stale += version - group.oldest_version() > eta
        for sample in (sample for group in batch.groups for sample in group):
            _increment(batch.oldest_staleness, version - sample.version_min)
            _increment(batch.newest_staleness, version - sample.version_max)
        return batch

    def release(self, excluded: Collection[str]) -> list[SampleMeta]:
        """Undo ``take`` for a batch that is not trained. Call it before any sample of it is transferred.

        The tickets ``excluded`` end here and will not be trained; the others are ready again. Returns the
        samples that may be cleared.
        """
        result = Added()
        copies = self._deferred
        taken = self._training
        self._training = {}
        self._deferred = []
        for ticket_id, group in taken.items():
            if ticket_id in excluded:
                result.clear.extend(group.ordered())
                self._end(ticket_id)
            else:
                self._ready[ticket_id] = group
        for copy in copies:
            self._refuse(copy, taken[copy.ticket_id], result)
        return result.clear

    def _accept(self, sample: SampleMeta, result: Added) -> bool:
        ticket_id = sample.ticket_id
        if ticket_id in self._training:
            # Not cleared before the step ends: the batch plan may have transferred the original to the
            # copy's worker, under the same sample id.
            self._deferred.append(sample)
            return False
        if ticket_id in self._ended:
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
        if self._keep(group.ordered()):
            self._ready[ticket_id] = group
            self.filtered_in_a_row = 0
            return
        self.filtered_in_a_row += 1
        result.dropped.append((ticket_id, SUCCESS_RATE))
        result.clear.extend(group.ordered())
        self._end(ticket_id)

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
        result.clear.extend(older.ordered())

    def _drop_stale(self, version: int, eta: int, batch: Batch) -> None:
        stale = sorted(t for t, group in self._ready.items() if version - group.oldest_version() > eta)
        for ticket_id in stale:
            group = self._ready.pop(ticket_id)
            batch.dropped.append((ticket_id, STALE))
            batch.clear.extend([*group.ordered(), *self._part_of(ticket_id)])
            self._end(ticket_id)

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

    def _end(self, ticket_id: str) -> None:
        self._ended[ticket_id] = None
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)


def owners_of(groups: Sequence[Sequence[SampleMeta]]) -> dict[str, set[int]]:
    """Return sample id -> the worker that received it, for ``plan_transfers``."""
    return {sample.sample_id: {sample.owner} for group in groups for sample in group}


def _increment(histogram: dict[int, int], staleness: int) -> None:
    histogram[staleness] = histogram.get(staleness, 0) + 1

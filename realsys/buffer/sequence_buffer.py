"""The replay buffer of the master: which groups are there, and which are trained next. Metadata only, no clock.

    notices ──add──> incomplete ──(all of its rows)─────> ready ──take──> in training ──(next take)──> remembered
              ├─> rejected (a copy)       │                 │   <─release─┘  └─release─> gone ─────────┤
              │                           │                 └───take──> dropped (too stale) ───────────┤
              └─────────add───────────────┴─────> dropped (not worth training: ``keep``) ──────────────┘

``add`` *consumes* what the stream delivers, in any order and possibly twice. ``take`` *waits for* nothing: it returns
no groups while too few are ready. What the owners may forget comes back as ``clear``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from realsys.types import SampleMeta

StalePolicy = Literal["drop", "train"]
#: the reasons of a drop here
STALE, SUCCESS_RATE = "stale", "success_rate"
#: Whether a complete group is worth training on.
Keep = Callable[[Sequence[SampleMeta]], bool]


@dataclass(slots=True)
class Added:
    """What ``add`` made of the samples. ``clear``: what nobody will train, to be forgotten by its owners.

    ``dropped``: (ticket_id, reason) of groups that were complete and not worth training on.
    """

    accepted: int = 0
    rejected: int = 0
    dropped: list[tuple[str, str]] = field(default_factory=list)
    clear: list[SampleMeta] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """The groups of one train step, oldest ticket first, and what was sorted out on the way.

    ``groups`` is empty when fewer than the asked number remain after drops; those then stay in the buffer.
    ``stale`` counts groups of this batch beyond the bound (policy ``train``). ``oldest_lag`` and ``newest_lag`` count
    the batch's rows by the versions their oldest and newest token is behind.
    """

    groups: list[list[SampleMeta]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)  # (ticket_id, reason)
    clear: list[SampleMeta] = field(default_factory=list)
    stale: int = 0
    oldest_lag: dict[int, int] = field(default_factory=dict)
    newest_lag: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """The rows of one ticket from one attempt, by sample id."""

    attempt: int
    samples: dict[str, SampleMeta] = field(default_factory=dict)

    def ordered(self) -> list[SampleMeta]:
        """Samples by episode, then row."""
        return sorted(self.samples.values(), key=lambda s: (s.episode, s.row))

    def oldest_version(self) -> int:
        return min(sample.version_min for sample in self.samples.values())


class SequenceBuffer:
    """Groups by ticket; each ticket leaves at most once.

    Each sample says how many rows its group has (``group_rows``); with all of them the group is complete. One that
    ``keep`` does not want leaves at once, with reason
    ``success_rate`` (``filtered_in_a_row``: such groups since the last one that stayed). Until a ticket is in training
    its latest attempt counts, for that is the one that the ledger goes by: it replaces an earlier one, and an earlier
    one that comes late is rejected. A second copy of a ticket that is in training, trained or dropped is rejected,
    whatever its attempt: for the ledger both ends are final, and a dropped ticket's place has been given away. The last
    ``remember`` ended tickets are known; the ledger lets nobody claim one older than that a second time.
    """

    def __init__(self, keep: Keep = lambda group: True, remember: int = 65536) -> None:
        if remember < 1:
            raise ValueError(f"SequenceBuffer: remember={remember} must be at least 1")
        self.rejected = 0  # samples, since the start
        self.filtered_in_a_row = 0  # groups
        self._keep, self._remember = keep, remember
        self._incomplete: dict[str, _Group] = {}
        self._ready: dict[str, _Group] = {}
        self._training: dict[str, _Group] = {}
        self._deferred: list[SampleMeta] = []  # copies of what is in training
        self._ended: OrderedDict[str, None] = OrderedDict()  # trained and dropped tickets, oldest first

    @property
    def ready_groups(self) -> int:
        """Complete groups, stale ones included."""
        return len(self._ready)

    @property
    def incomplete_groups(self) -> int:
        return len(self._incomplete)

    def held(self) -> dict[str, int]:
        """Ticket -> attempt of every complete group that is here and not in training.

        Of one that is here in part the rest may be lost; another attempt takes its place.
        """
        return {ticket: group.attempt for ticket, group in self._ready.items()}

    def fresh_groups(self, version: int, eta: int) -> int:
        """Complete groups that ``take`` would not drop: what a step loop waits for under policy ``drop``."""
        return sum(version - group.oldest_version() <= eta for group in self._ready.values())

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._ready or ticket_id in self._incomplete

    def add(self, samples: Iterable[SampleMeta]) -> Added:
        """Take in samples, complete groups or parts of them. Never raises on a copy: it is rejected and counted."""
        result = Added()
        for sample in samples:
            if self._accept(sample, result):
                result.accepted += 1
            else:
                result.rejected += 1
                self.rejected += 1
        return result

    def take(self, batch_groups: int, version: int, eta: int, stale_policy: StalePolicy) -> Batch:
        """The ``batch_groups`` oldest complete groups, for training on top of version ``version``.

        Under ``drop`` every complete group whose oldest token is more than ``eta`` versions behind leaves the buffer
        with reason ``stale``, whether or not the batch fills. The batch taken before counts as trained from here on.
        """
        batch = Batch(clear=self._settle())
        if stale_policy == "drop":
            self._drop_stale(version, eta, batch)
        if len(self._ready) < batch_groups:
            return batch
        # ids are zero-padded numbers, so their lexical order is the order of the grants
        for ticket_id in sorted(self._ready)[:batch_groups]:
            group = self._ready.pop(ticket_id)
            self._training[ticket_id] = group
            self._deferred += self._part_of(ticket_id)
            batch.groups.append(group.ordered())
            batch.stale += version - group.oldest_version() > eta
        for sample in (sample for group in batch.groups for sample in group):
            _increment(batch.oldest_lag, version - sample.version_min)
            _increment(batch.newest_lag, version - sample.version_max)
        return batch

    def release(self, gone: Collection[str]) -> list[SampleMeta]:
        """The batch that was taken is not trained: the tickets ``gone`` must never be, the others are ready again.

        Before anything of it has been moved. Returns what may be cleared.
        """
        result, copies = Added(), self._deferred
        taken, self._training, self._deferred = self._training, {}, []
        for ticket_id, group in taken.items():
            if ticket_id in gone:
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
            # The batch plan may have brought the original to the copy's worker by now, under the same sample id.
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
        """One that came twice has one sample id: on the same owner clearing the copy would clear the original."""
        original = held.samples.get(copy.sample_id)
        if original is None or original.owner != copy.owner:
            result.clear.append(copy)

    def _discard(self, older: _Group, result: Added) -> None:
        """A later attempt replaces one that is not in training."""
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
        """What has come of a later attempt, which will not be waited for."""
        part = self._incomplete.pop(ticket_id, None)
        return part.ordered() if part else []

    def _settle(self) -> list[SampleMeta]:
        """The batch taken before has been trained; returns the copies that may be cleared now."""
        for ticket_id in self._training:
            self._end(ticket_id)
        self._training.clear()
        released, self._deferred = self._deferred, []
        return released

    def _end(self, ticket_id: str) -> None:
        self._ended[ticket_id] = None
        while len(self._ended) > self._remember:
            self._ended.popitem(last=False)


def lag_summary(lags: dict[int, int]) -> dict[str, float]:
    """min, mean and max of a histogram lag -> count; zeros when it is empty."""
    count = sum(lags.values())
    if not count:
        return {"min": 0.0, "mean": 0.0, "max": 0.0}
    mean = sum(lag * n for lag, n in lags.items()) / count
    return {"min": float(min(lags)), "mean": mean, "max": float(max(lags))}


def owners_of(groups: Sequence[Sequence[SampleMeta]]) -> dict[str, set[int]]:
    """sample id -> the worker the stream brought it to: what ``plan_transfers`` starts from."""
    return {sample.sample_id: {sample.owner} for group in groups for sample in group}


def _increment(histogram: dict[int, int], lag: int) -> None:
    histogram[lag] = histogram.get(lag, 0) + 1

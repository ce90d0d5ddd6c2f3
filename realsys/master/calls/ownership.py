"""The master's table of which worker holds which array of which sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.algorithm.batch.redistribute import Holders, TransferPlan

_NO_WORKER: Holders = frozenset()


@dataclass(slots=True)
class Ownership:
    """The holders of each array.

    ``owners[key][sample_id]``: the workers that hold the array when they serve the next request
    that is sent.
    """

    owners: dict[str, dict[str, Holders]] = field(default_factory=dict)

    def add_owners(self, keys: Iterable[str], owners: Mapping[str, Holders]) -> None:
        """Add holders. ``owners``: sample id -> workers that hold all of ``keys``."""
        for key in keys:
            column = self.owners.setdefault(key, {})
            # Equal sets stay one object, by which the next plan groups samples.
            column |= {name: column[name] | new if name in column else new for name, new in owners.items()}

    def add_transfers(self, plan: TransferPlan) -> None:
        """Count the destinations as holders from now on."""
        for keys, samples, new in plan.holders:
            for key in keys:
                column = self.owners[key]
                for name in samples:
                    # An array may go to the last stage and to the others by two entries.
                    column[name] = new if column[name] <= new else column[name] | new

    def discard_keys(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """Discard these arrays of all samples; return worker -> samples of which it held any of them."""
        columns = [self.owners.pop(key, {}) for key in keys]
        return _held(columns, list(dict.fromkeys(name for column in columns for name in column)))

    def discard_samples(self, sample_ids: Sequence[str]) -> dict[int, list[str]]:
        """Discard these samples; return worker -> those of which it held any array."""
        held = _held(list(self.owners.values()), sample_ids)
        for column in self.owners.values():
            for name in sample_ids:
                column.pop(name, None)
        return held


def _held(columns: Sequence[Mapping[str, Holders]], sample_ids: Sequence[str]) -> dict[int, list[str]]:
    held: defaultdict[int, list[str]] = defaultdict(list)
    if not columns:
        return held
    rows = zip(*(map(column.get, sample_ids) for column in columns), strict=True)
    for name, holders_of_arrays in zip(sample_ids, rows, strict=True):
        # Many arrays of a sample share one object: a set of sets is smaller.
        for worker in _NO_WORKER.union(*filter(None, set(holders_of_arrays))):
            held[worker].append(name)
    return dict(sorted(held.items()))

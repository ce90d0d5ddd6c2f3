"""The master's table of which worker holds which array of which sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ownership:
    """The holders of each array.

    ``owners[key][sample_id]``: the workers that hold the array when they serve the next request
    that is sent.
    """

    owners: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    def add(self, key: str, sample_id: str, worker: int) -> None:
        self.owners.setdefault(key, {}).setdefault(sample_id, set()).add(worker)

    def add_owners(self, keys: Iterable[str], owners: Mapping[str, Iterable[int]]) -> None:
        """Add holders. ``owners``: sample id -> workers that hold all of ``keys``."""
        for key in keys:
            for sample_id, workers in owners.items():
                self.owners.setdefault(key, {}).setdefault(sample_id, set()).update(workers)

    def discard_keys(self, keys: Iterable[str]) -> set[int]:
        """Discard these arrays of all samples; return the workers that held any of them."""
        return {worker for key in keys for workers in self.owners.pop(key, {}).values() for worker in workers}

    def discard_samples(self, sample_ids: Iterable[str]) -> set[int]:
        """Discard these samples; return the workers that held any array of them."""
        holders: set[int] = set()
        discarded = list(sample_ids)
        for samples in self.owners.values():
            for sample_id in discarded:
                holders |= samples.pop(sample_id, set())
        return holders

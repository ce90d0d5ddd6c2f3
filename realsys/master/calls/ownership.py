"""Who holds which array of which sample: the master's table, and what becomes of an array nobody reads any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ownership:
    """``owners[key][sample_id]``: the workers that hold the array, or will before they get to anything sent later."""

    owners: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    def add(self, key: str, sample_id: str, worker: int) -> None:
        self.owners.setdefault(key, {}).setdefault(sample_id, set()).add(worker)

    def add_owners(self, keys: Iterable[str], owners: Mapping[str, Iterable[int]]) -> None:
        """``owners``: sample id -> workers that hold all of ``keys``."""
        for key in keys:
            for sample_id, workers in owners.items():
                self.owners.setdefault(key, {}).setdefault(sample_id, set()).update(workers)

    def drop(self, keys: Iterable[str]) -> set[int]:
        """Forget these arrays of all samples; returns the workers that held any of them."""
        return {worker for key in keys for workers in self.owners.pop(key, {}).values() for worker in workers}

    def forget(self, sample_ids: Iterable[str]) -> set[int]:
        """Forget these samples; returns the workers that held anything of them."""
        holders: set[int] = set()
        gone = list(sample_ids)
        for samples in self.owners.values():
            for sample_id in gone:
                holders |= samples.pop(sample_id, set())
        return holders

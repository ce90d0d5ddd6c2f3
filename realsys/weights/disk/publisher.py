"""The master's side of the transport ``disk``: makes, completes, checks and removes versions. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from realsys.errors import WeightsError
from realsys.weights.base import Committed, PublisherParts, Removed
from realsys.weights.disk import manifest
from realsys.weights.disk.records import DiskPlan, ShardInfo
from realsys.weights.disk.tensor_files import materialise, prove


class DiskPublisher:
    """Owns the folder ``root`` of one role's versions. ``keep``: newest versions that ``prune``
    leaves there."""

    def __init__(self, parts: PublisherParts, keep: int) -> None:
        self.root = parts.root
        self.keep = keep
        self._model_dir = parts.model_dir
        self._incarnation = parts.incarnation

    def prepare(self, version: int, base: str) -> DiskPlan:
        """Make the version's ``.tmp`` folder, empty."""
        tmp = manifest.prepare(self.root, version, self._incarnation)
        return DiskPlan(str(tmp), Path(base).name if base else "")

    def commit(
        self, version: int, step: int, plan: DiskPlan, reports: Sequence[Any], *, replace: bool = False
    ) -> Committed:
        """Check the ranks' files, write index and manifest, and rename the folder. Raises
        WeightsError."""
        try:
            shards = [shard for report in reports for shard in msgspec.convert(report, list[ShardInfo])]
        except msgspec.ValidationError as error:
            raise WeightsError(f"weights v{version}: the report of a rank cannot be read: {error}") from None
        final = manifest.commit(
            Path(plan.directory),
            version=version,
            incarnation=self._incarnation,
            step=step,
            shards=shards,
            model_dir=self._model_dir,
            replace=replace,
        )
        size = sum(manifest.tensor_bytes(info) for shard in shards for info in shard.tensors.values())
        return Committed(str(final), sum(shard.size for shard in shards), size)

    def check(self, locator: str) -> None:
        """Check that the manifest can be read and that all files have their sizes."""
        manifest.check_reference(Path(locator))

    def verify(self, locator: str, version: int) -> None:
        """Read every byte of the version. Raises WeightsError."""
        prove(Path(locator), version)

    def prune(self, newest: str) -> Removed:
        """Delete all but the newest ``keep`` versions and what they refer to.

        Versions of earlier incarnations go like older ones: the newest of them stays for as long as
        a server may be in the middle of reading it.
        """
        return _named(manifest.prune(self.root, keep=self.keep, in_use=[Path(newest)]))

    def discard_unfinished(self) -> Removed:
        """Delete the folders that earlier incarnations left half written or half removed."""
        return _named(manifest.discard_unfinished(self.root))

    def export(self, locator: str, version: int, target: Path) -> None:
        """Write the version to ``target`` as a plain HF folder."""
        materialise(Path(locator), target, version)


def _named(removed: manifest.Removed) -> Removed:
    problems = {str(path): problem for path, problem in removed.problems.items()}
    return Removed([str(path) for path in removed.gone], problems)

"""The transport ``disk``: builder of its three sides, and publisher. Only ``writer`` and ``reader`` import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.commit_folder import Removed
from realsys.errors import WeightsError
from realsys.weights.byte_ranges import RangeClient
from realsys.weights.contract import (
    Committed,
    PublisherParts,
    ReaderParts,
    Transport,
    WeightReader,
    WeightWriter,
    WriterParts,
)
from realsys.weights.disk import manifest
from realsys.weights.disk.manifest import VERSION, DiskPlan, ShardInfo
from realsys.weights.disk.plain_folders import materialise, verify

FULL_EVERY = 8  # versions that change a tensor, after which it is stored whole: a reader follows at most seven changes


class DiskTransport(Transport):
    """Versions as folders of files below ``PublisherParts.root``; a locator is the path of such a
    folder."""

    def writer(self, parts: WriterParts) -> WeightWriter:
        from realsys.weights.disk.writer import DiskWriter, ShardWriter

        weights = self.config.weights
        files = ShardWriter(deltas=weights.delta == "auto", full_every=FULL_EVERY)
        return DiskWriter(files, parts.check_alive)

    def publisher(self, parts: PublisherParts) -> DiskPublisher:
        return DiskPublisher(parts, self.config.weights.keep_versions)

    def reader(self, parts: ReaderParts) -> WeightReader:
        from realsys.weights.host_copies import SharedCopies
        from realsys.weights.host_reader import HostReader

        return HostReader(SharedCopies(parts.trial, parts.model_dir, token=parts.token))


class DiskPublisher:
    """Owner of the folder ``root`` of one role's versions. ``keep``: number of newest versions that
    ``prune`` keeps."""

    def __init__(self, parts: PublisherParts, keep: int) -> None:
        self.root = parts.root
        self.keep = keep
        self._model_dir = parts.model_dir
        self._incarnation = parts.incarnation
        self._check_alive = parts.check_alive
        self._shards = RangeClient(parts.token)

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
            check_alive=self._check_alive,
        )
        size = sum(manifest.tensor_bytes(info) for shard in shards for info in shard.tensors.values())
        return Committed(str(final), sum(shard.size for shard in shards), size)

    def check(self, locator: str) -> None:
        """Check that the manifest can be read and that all files have their sizes."""
        manifest.check_reference(Path(locator))

    def verify(self, locator: str, version: int) -> None:
        """Read every byte of the version. Raises WeightsError."""
        verify(Path(locator), version, self._shards)

    def prune(self, in_use: Sequence[str]) -> Removed:
        """Delete all but the newest ``keep`` versions, those in use, and the versions that these refer to.

        Versions of earlier incarnations count as older ones. So the newest of them stays for a
        while, because a server may still read it.
        """
        return manifest.prune(self.root, keep=self.keep, in_use=[self.root / Path(name).name for name in in_use])

    def discard_unfinished(self) -> Removed:
        """Delete the folders that earlier incarnations have written or removed in part."""
        return VERSION.remove(VERSION.unfinished(self.root))

    def export(self, locator: str, version: int, target: Path) -> None:
        """Write the version to ``target`` as a plain HF folder."""
        materialise(Path(locator), target, version, self._shards)

"""Builder of the three sides of the transport ``disk``. Only ``writer`` and ``reader`` import torch."""

from __future__ import annotations

from realsys.weights.base import PublisherParts, ReaderParts, Transport, WeightReader, WeightWriter, WriterParts
from realsys.weights.disk.publisher import DiskPublisher


class DiskTransport(Transport):
    """Versions as folders of files below ``PublisherParts.root``; a locator is the path of such a
    folder."""

    def writer(self, parts: WriterParts) -> WeightWriter:
        from realsys.weights.disk.shards import ShardWriter
        from realsys.weights.disk.writer import DiskWriter

        weights = self.config.weights
        files = ShardWriter(deltas=weights.delta == "auto", full_every=weights.full_every)
        return DiskWriter(files, parts.check_alive)

    def publisher(self, parts: PublisherParts) -> DiskPublisher:
        return DiskPublisher(parts, self.config.weights.keep_versions)

    def reader(self, parts: ReaderParts) -> WeightReader:
        from realsys.weights.host.copies import HostCopies
        from realsys.weights.host.host_reader import HostReader

        return HostReader(HostCopies(parts.trial, parts.model_dir))

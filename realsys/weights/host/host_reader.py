"""Reader of the transport ``disk``: the servers of a host share one copy of each version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from realsys.cluster.failpoint import failpoint
from realsys.errors import WeightsError
from realsys.weights.base import StagedWeights
from realsys.weights.disk.dtypes import as_tensor
from realsys.weights.disk.manifest import load_manifest
from realsys.weights.disk.reader import ReadReport
from realsys.weights.disk.stage import all_kept
from realsys.weights.host.copies import HostCopies, LeasedCopy
from realsys.weights.host.peers import PeerCopies


class HostReader:
    """Stages one version after the other for one server, in memory that the host's servers share."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self.token: str | None = None  # token for the services of other hosts
        self._offer: tuple[str, Sequence[str]] = ("", ())  # locator, and services that have a copy of it
        self._newest = ("", -1)  # (trainer incarnation, version) of the last staged version
        self._staged: LeasedCopy | None = None
        self._checksums: dict[str, str] = {}  # checksums of the last staged version; empty if the last call failed

    def stage(self, locator: str, version: int, *, loaded: bool = False) -> StagedWeights:
        """Return the tensors of the version in the folder ``locator``, verified by a server of this host.

        ``loaded``: the engine has the version of the last call. One with the same tensors is then returned without
        them, and nothing of it is read. Raises WeightsError. The tensors are of this version until ``release`` of the
        result, or the next call.
        """
        self.release()
        if loaded and (report := self._adopted(Path(locator), version)):
            return StagedWeights({}, counts=report.counts(), unchanged=True)
        before, self._checksums = self._checksums, {}
        failpoint("server.stage")
        copy = self._staged = self.copies.stage(Path(locator), version, self._peers)
        info = copy.info
        self._check_age(locator, info.age)
        self._newest, self._checksums = info.age, {name: one.checksum for name, one in info.tensors.items()}
        return StagedWeights(
            {
                name: as_tensor(data, info.tensors[name].dtype, info.tensors[name].shape)
                for name, data in copy.tensors().items()
            },
            copy.report.timings(),
            copy.report.counts(),
            unchanged=self._checksums == before,
            folder=copy.folder,
            release=copy.close,
        )

    def _adopted(self, directory: Path, version: int) -> ReadReport | None:
        """Adopt a version with the tensors of the last one, without reading it; None if it has others."""
        manifest = load_manifest(directory, version)
        if {name: one.checksum for name, one in manifest.tensors.items()} != self._checksums:
            return None
        age = (manifest.incarnation, manifest.version)
        self._check_age(str(directory), age)
        self._newest = age
        return all_kept(manifest)

    def _check_age(self, locator: str, age: tuple[str, int]) -> None:
        """Raise WeightsError if a newer version was staged (``monotonic``)."""
        if age < self._newest:
            self.release()
            incarnation, newest = self._newest
            raise WeightsError(f"{locator} is older than version {newest} of trainer {incarnation}: not staged")

    def offer(self, locator: str, sources: Sequence[str]) -> None:
        """Name services of other hosts that have a copy of the version ``locator``. Thread-safe."""
        self._offer = (locator, sources)

    def _peers(self, directory: Path, version: int, incarnation: str) -> PeerCopies:
        locator, sources = self._offer
        return PeerCopies(sources if locator == str(directory) else (), version, incarnation, self.token)

    def release(self) -> None:
        """End the use of the tensors that were staged last."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def close(self) -> None:
        """End all use of the host's copies."""
        self.release()
        self.copies.close()

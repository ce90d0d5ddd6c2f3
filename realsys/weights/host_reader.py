"""Reader of the built-in transports: the servers of a host share one copy of each version, and give it to other hosts.

A tensor has the same place in the copies of all hosts. The reader verifies each tensor against the manifest, which it
reads from storage; after any failure it reads the rest from where the ranks have written it.
"""

from __future__ import annotations

import http.client
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_server import Guard, HttpServer
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.schema import Config
from realsys.errors import WeightsError
from realsys.weights.byte_ranges import OpenFile, RangeClient, range_app
from realsys.weights.contract import StagedWeights, WeightReader
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import VersionManifest, load_manifest
from realsys.weights.disk.plain_folders import write_adapters
from realsys.weights.disk.reader import all_kept
from realsys.weights.host_copies import WEIGHTS, LeasedCopy, SharedCopies

log = logging.getLogger(__name__)
PATH = "/copy"


class HostReader:
    """Stages one version after the other for one server, in memory that the host's servers share."""

    def __init__(self, copies: SharedCopies) -> None:
        self.copies = copies
        self._offer: tuple[str, Sequence[str], bool] = ("", (), False)  # see offer()
        self._newest = ("", -1)  # (trainer incarnation, version) of the last staged version
        self._staged: LeasedCopy | None = None
        self.checksums: dict[str, str] = {}  # checksums of the last staged version; empty if the last call failed

    def stage(self, locator: str, version: int, *, loaded: bool = False) -> StagedWeights:
        """Return the tensors of the version in the folder ``locator``, verified by a server of this host.

        ``loaded``: the engine has the version of the last call. One with the same tensors is then returned without
        them, and nothing of it is read. Raises WeightsError. The tensors are of this version until ``release`` of the
        result, or the next call.
        """
        from realsys.weights.disk.dtypes import as_tensor

        self.release()
        if loaded and self.adopts(manifest := load_manifest(Path(locator), version)):
            self.note(locator, manifest)
            return StagedWeights({}, counts=all_kept(manifest).counts(), unchanged=True)
        before, self.checksums = self.checksums, {}
        failpoint("server.stage")
        copy = self._staged = self.copies.stage(Path(locator), version, self._peers, older=self._may_be_older(locator))
        info = copy.info
        self._check_age(locator, info.age)
        self.checksums = {name: one.checksum for name, one in info.tensors.items()}
        return StagedWeights(
            {
                name: as_tensor(data, info.tensors[name].dtype, info.tensors[name].shape)
                for name, data in copy.tensors().items()
            },
            copy.report.timings(),
            copy.report.counts(),
            unchanged=self.checksums == before,
            folder=copy.folder,
            release=copy.close,
        )

    def read(self, locator: str, version: int) -> StagedWeights:
        """Return the tensors of any version, verified, in memory of the caller's own. Thread-safe; raises WeightsError.

        The host's copies are not touched: the next version in training is made from the newest of them.
        """
        from realsys.weights.disk.stage import stage

        return stage(Path(locator), version, shards=self.copies.client)

    def write_adapters(self, locator: str, version: int, target: Path, *, loaded: bool) -> bool:
        """Write the adapters of any version to ``target`` as a PEFT directory (``plain_folders.write_adapters``).

        ``loaded``: the engine has the version that was staged last. Thread-safe while nothing is staged.
        """
        under = self.checksums if loaded else None
        return write_adapters(Path(locator), target, version, under, self.copies.client)

    def adopts(self, manifest: VersionManifest) -> bool:
        """Return True if a version has the tensors of the last one."""
        return checksums_of(manifest) == self.checksums

    def note(self, locator: str, manifest: VersionManifest) -> None:
        """Take a version for the last one without reading it. Raises WeightsError if it is older."""
        age = (manifest.incarnation, manifest.version)
        self._check_age(locator, age)
        self.checksums = checksums_of(manifest)

    def _check_age(self, locator: str, age: tuple[str, int]) -> None:
        """Raise WeightsError if a newer version was staged (``monotonic``), unless the manager wants an older one."""
        if age < self._newest and not self._may_be_older(locator):
            self.release()
            incarnation, newest = self._newest
            raise WeightsError(f"{locator} is older than version {newest} of trainer {incarnation}: not staged")
        self._newest = max(self._newest, age)

    def offer(self, locator: str, sources: Sequence[str], older: bool = False) -> None:
        """Name services of other hosts that have a copy of the version ``locator``. Thread-safe.

        ``older``: it may be older than versions that were staged before, because it is pinned.
        """
        self._offer = (locator, sources, older)

    def _may_be_older(self, locator: str) -> bool:
        return self._offer[0] == locator and self._offer[2]

    def _peers(self, directory: Path, version: int, incarnation: str) -> PeerCopies:
        locator, sources, _ = self._offer
        return PeerCopies(sources if locator == str(directory) else (), version, incarnation, self.copies.client)

    def release(self) -> None:
        """End the use of the tensors that were staged last."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    def close(self) -> None:
        """End all use of the host's copies."""
        self.release()
        self.copies.close()


def checksums_of(manifest: VersionManifest) -> dict[str, str]:
    return {name: one.checksum for name, one in manifest.tensors.items()}


# ---- copies on other hosts


class PeerCopies:
    """Sources of one staging, best first. A source that fails is dropped."""

    def __init__(self, urls: Sequence[str], version: int, incarnation: str, client: RangeClient) -> None:
        self._urls = list(urls)
        self._wanted = {"version": version, "incarnation": incarnation}
        self._client = client

    def fetch(self, start: int, into: Bytes, on_chunk: Callable[[], None]) -> bool:
        """Fill ``into`` with the bytes of a copy from ``start`` on. False if no source has them."""
        while self._urls:
            try:
                self._client.fetch(self._urls[0] + PATH, self._wanted, start, into, on_chunk)
                return True
            except (OSError, http.client.HTTPException) as error:
                url, problem = self._urls.pop(0), f"{type(error).__name__}: {error}"
                log.warning("%s is not used as a source of weights: %s", url, problem)
        return False

    def close(self) -> None:
        self._client.close()


# ---- service of this host's copies


class CopyService:
    """Runs if ``weights.storage_readers`` is set and the transport's reader has copies. ``url`` is "" otherwise.

    ``offer`` passes on to that reader what an update says about its version.
    """

    def __init__(self, reader: WeightReader, config: Config, token: str | None, check_alive: CheckAlive) -> None:
        self.url = ""
        self._reader = reader if isinstance(reader, HostReader) else None
        if self._reader is not None and config.weights.storage_readers:
            app = copy_app(self._reader.copies, token=token, check_alive=check_alive)
            # In a thread of its own: a transfer must not delay the answers of the engine's service.
            self._http = HttpServer(app, config.cluster.host)
            self._http.start(config.cluster.connect_timeout_s)
            self.url = self._http.url

    def offer(self, locator: str, sources: Sequence[str], older: bool) -> None:
        """Read the version ``locator`` from these services, if it is staged next."""
        if self._reader is not None:
            self._reader.offer(locator, sources, older)

    def close(self) -> None:
        if self.url:
            self._http.close()


def copy_app(copies: SharedCopies, *, token: str | None, check_alive: CheckAlive = unleased) -> Guard:
    """Return the service of a host's copies, behind the guard. Every request needs the token."""

    def find(wanted: Mapping[str, str]) -> OpenFile | None:
        version = wanted.get("version", "")
        if not version.isdecimal() or (copy := copies.find(int(version), wanted.get("incarnation", ""))) is None:
            return None
        return OpenFile(os.open(copy.folder / WEIGHTS, os.O_RDONLY), copy.close)  # the lease ends with the last byte

    return range_app(PATH, find, token=token, check_alive=check_alive)

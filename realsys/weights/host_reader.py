"""Reader of the transport ``disk``: the servers of a host share one copy of each version, and give it to other hosts.

    GET /copy?version=7&incarnation=0001   Range: bytes=a-b   ──> 206 with these bytes, 404 if the copy is not complete

A tensor has the same place in the copies of all hosts. The reader verifies each tensor against the manifest, which it
reads from storage; after any failure it reads the rest from storage.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from realsys.cluster.failpoint import failpoint
from realsys.cluster.http_client import authorization
from realsys.cluster.http_server import Admission, Guard, HttpServer
from realsys.cluster.lease import CheckAlive, unleased
from realsys.config.schema import Config
from realsys.errors import WeightsError
from realsys.weights.contract import StagedWeights, WeightReader
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.dtypes import as_tensor
from realsys.weights.disk.manifest import load_manifest
from realsys.weights.disk.reader import ReadReport, all_kept
from realsys.weights.host_copies import WEIGHTS, LeasedCopy, SharedCopies

log = logging.getLogger(__name__)
PATH = "/copy"
_CHUNK = 4 << 20
_SILENCE_S = 10.0  # time without a byte after which a source is given up
_SLOWEST = 10e6  # bytes per second; a source that is slower is given up
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class HostReader:
    """Stages one version after the other for one server, in memory that the host's servers share."""

    def __init__(self, copies: SharedCopies) -> None:
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


# ---- copies on other hosts


class PeerCopies:
    """Sources of one staging, best first. A source that fails is dropped."""

    def __init__(self, urls: Sequence[str], version: int, incarnation: str, token: str | None) -> None:
        self._urls = list(urls)
        self._path = f"{PATH}?{urlencode({'version': version, 'incarnation': incarnation})}"
        self._token = token
        self._connection: http.client.HTTPConnection | None = None

    def fetch(self, start: int, into: Bytes, on_chunk: Callable[[], None]) -> bool:
        """Fill ``into`` with the bytes of a copy from ``start`` on. False if no source has them."""
        while self._urls:
            try:
                self._fetch(self._urls[0], start, into, on_chunk)
                return True
            except (OSError, http.client.HTTPException) as error:
                self.drop(f"{type(error).__name__}: {error}")
        return False

    def drop(self, problem: str) -> None:
        """Ask the current source no more."""
        if self._urls:
            log.warning("%s is not used as a source of weights: %s", self._urls.pop(0), problem)
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fetch(self, url: str, start: int, into: Bytes, on_chunk: Callable[[], None]) -> None:
        if not into.size:
            return
        if self._connection is None:
            place = urlsplit(url)
            self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_SILENCE_S)
        wanted = {"Range": f"bytes={start}-{start + into.size - 1}"}
        signed = {"Authorization": authorization(self._token, "GET", url + self._path)} if self._token else {}
        self._connection.request("GET", self._path, headers=signed | wanted)
        reply = self._connection.getresponse()
        if reply.status != 206:
            raise http.client.HTTPException(f"status {reply.status}")
        view, done = into.data, 0
        end = time.monotonic() + _SILENCE_S + into.size / _SLOWEST
        while done < into.size:
            count = reply.readinto(view[done : done + _CHUNK])
            if not count or time.monotonic() > end:
                raise http.client.HTTPException(f"{done} of {into.size} bytes came in time")
            done += count
            on_chunk()
        reply.read()  # the end of the reply, so that the connection can be used again


# ---- service of this host's copies


class CopyService:
    """Runs if ``weights.storage_readers`` is set and the transport's reader has copies. ``url`` is "" otherwise."""

    def __init__(self, reader: WeightReader, config: Config, token: str | None, check_alive: CheckAlive) -> None:
        self.url = ""
        self._reader = reader if config.weights.storage_readers and isinstance(reader, HostReader) else None
        if self._reader is not None:
            self._reader.token = token
            app = copy_app(self._reader.copies, token=token, check_alive=check_alive)
            # In a thread of its own: a transfer must not delay the answers of the engine's service.
            self._http = HttpServer(app, config.cluster.host)
            self._http.start(config.cluster.connect_timeout_s)
            self.url = self._http.url

    def offer(self, locator: str, sources: Sequence[str]) -> None:
        """Read the version ``locator`` from these services, if it is staged next."""
        if self._reader is not None:
            self._reader.offer(locator, sources)

    def close(self) -> None:
        if self._reader is not None:
            self._http.close()


def copy_app(copies: SharedCopies, *, token: str | None, check_alive: CheckAlive = unleased) -> Guard:
    """Return the service of a host's copies, behind the guard. Every request needs the token."""

    async def serve(request: Request) -> Response:
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        version = request.query_params.get("version", "")
        if asked is None or not version.isdecimal():
            return PlainTextResponse("version and Range: bytes=a-b are needed", 400)
        copy = await asyncio.to_thread(copies.find, int(version), request.query_params.get("incarnation", ""))
        if copy is None:
            return PlainTextResponse("no complete copy of this version", 404)
        file = os.open(copy.folder / WEIGHTS, os.O_RDONLY)
        start, stop = int(asked[1]), int(asked[2]) + 1
        if not start < stop <= os.fstat(file).st_size:
            os.close(file)
            copy.close()
            return PlainTextResponse("the range is outside the copy", 416)
        headers = {"Content-Length": str(stop - start)}
        return StreamingResponse(_Range(copy, file, start, stop).chunks(), 206, headers)

    app = Starlette(routes=[Route(PATH, serve)])
    return Guard(app, Admission(token, [PATH], check_alive), max_body=0, error=lambda text: {"error": text})


@dataclass(frozen=True, slots=True)
class _Range:
    copy: LeasedCopy
    file: int
    start: int
    stop: int

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes. The copy has a lease until the end."""
        try:
            at = self.start
            while at < self.stop:
                chunk = await asyncio.to_thread(os.pread, self.file, min(_CHUNK, self.stop - at), at)
                if not chunk:
                    raise OSError(f"{self.copy.folder} ends at byte {at}")
                yield chunk
                at += len(chunk)
        finally:
            os.close(self.file)
            self.copy.close()

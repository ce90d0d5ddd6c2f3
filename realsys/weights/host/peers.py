"""Copies on other hosts, read by HTTP range requests, and the service of this host's copies. No torch.

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
from urllib.parse import urlencode, urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from realsys.cluster.http_server import Admission, Guard
from realsys.cluster.http_signature import authorization
from realsys.cluster.lease import CheckAlive, unleased
from realsys.weights.disk.delta import Bytes
from realsys.weights.host.copies import HostCopies, LeasedCopy
from realsys.weights.host.copy_records import WEIGHTS

log = logging.getLogger(__name__)

PATH = "/copy"
_CHUNK = 4 << 20
_SILENCE_S = 10.0  # time without a byte after which a source is given up
_SLOWEST = 10e6  # bytes per second; a source that is slower is given up
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


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


def copy_app(copies: HostCopies, *, token: str | None, check_alive: CheckAlive = unleased) -> Guard:
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

"""Bytes of weights from the memory of another host: the service of a host's files, and its client.

    GET /copy?version=7&incarnation=0001                         Range: bytes=a-b   ──> 206 with these bytes
    GET /shard?role=actor&folder=v00000007.0001&file=model-...   Range: bytes=a-b   ──> 404 without the file

A server gives its copies to other servers (``host_reader``), a rank of the trainer gives its shards (``memory``).
Readers verify the bytes against the manifest. Every request needs the token of the trial.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from realsys.cluster.http_client import authorization
from realsys.cluster.lease import CheckAlive, unleased
from realsys.weights.disk.delta import Bytes

if TYPE_CHECKING:  # a client needs no service
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from realsys.cluster.http_server import Guard

_CHUNK = 4 << 20
_MAX_BODY = 1 << 20
_SILENCE_S = 10.0  # time without a byte after which a source is given up
_SLOWEST = 10e6  # bytes per second; a source that is slower is given up
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


# ---- service


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is served. ``release``: called once, after its last byte."""

    descriptor: int
    release: Callable[[], None] = lambda: None

    def close(self) -> None:
        os.close(self.descriptor)
        self.release()


#: answers a POST of the service
Handler = Callable[["Request"], Awaitable["Response"]]


def range_app(
    path: str,
    find: Callable[[Mapping[str, str]], OpenFile | None],
    *,
    token: str | None,
    check_alive: CheckAlive = unleased,
    more: Mapping[str, Handler] = MappingProxyType({}),
) -> Guard:
    """Return the service of files, behind the guard.

    ``find`` gets the parameters of the URL. It opens the file, on a thread, or returns None if it is not there.
    ``more``: handlers of POST requests by path.
    """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    from realsys.cluster.http_server import Admission, Guard

    class FileResponse(StreamingResponse):
        """Closes the file at its end, also if the client leaves before the first chunk."""

        def __init__(self, file: OpenFile, *given: Any) -> None:
            super().__init__(*given)
            self._file = file

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._file.close()

    async def serve(request: Request) -> Response:
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if asked is None:
            return PlainTextResponse("Range: bytes=a-b is needed", 400)
        file = await asyncio.to_thread(find, request.query_params)
        if file is None:
            return PlainTextResponse("this process does not have the file", 404)
        start, stop = int(asked[1]), int(asked[2]) + 1
        if not start < stop <= os.fstat(file.descriptor).st_size:
            file.close()
            return PlainTextResponse("the range is outside the file", 416)
        headers = {"Content-Length": str(stop - start)}
        return FileResponse(file, _chunks(file, start, stop), 206, headers)

    others = [Route(other, handler, methods=["POST"]) for other, handler in more.items()]
    app, limit = Starlette(routes=[Route(path, serve), *others]), _MAX_BODY if more else 0
    return Guard(app, Admission(token, [path], check_alive), max_body=limit, error=lambda text: {"error": text})


async def _chunks(file: OpenFile, at: int, stop: int) -> AsyncIterator[bytes]:
    while at < stop:
        chunk = await asyncio.to_thread(os.pread, file.descriptor, min(_CHUNK, stop - at), at)
        if not chunk:
            raise OSError(f"a served file ends at byte {at}")
        yield chunk
        at += len(chunk)


# ---- client


class RangeClient:
    """Fetches bytes of files. Each thread has a connection of its own to the place that it asked last."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._own = threading.local()

    def fetch(
        self, url: str, wanted: Mapping[str, object], start: int, into: Bytes, on_chunk: Callable[[], None]
    ) -> None:
        """Fill ``into`` with the bytes from ``start`` on of the file that ``wanted`` names at ``url``.

        Raises OSError or HTTPException if they do not come, also if they come too slowly.
        """
        if not into.size:
            return
        try:
            self._fetch(url, wanted, start, into, on_chunk)
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def _fetch(
        self, url: str, wanted: Mapping[str, object], start: int, into: Bytes, on_chunk: Callable[[], None]
    ) -> None:
        place = urlsplit(url)
        target = f"{place.path}?{urlencode(wanted)}"
        if getattr(self._own, "place", None) != place.netloc:
            self.close()
            self._own.connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_SILENCE_S)
            self._own.place = place.netloc
        connection: http.client.HTTPConnection = self._own.connection
        signed = {}
        if self._token:
            signed = {"Authorization": authorization(self._token, "GET", f"{place.scheme}://{place.netloc}{target}")}
        connection.request("GET", target, headers=signed | {"Range": f"bytes={start}-{start + into.size - 1}"})
        reply = connection.getresponse()
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

    def close(self) -> None:
        """Close the connection of this thread."""
        if getattr(self._own, "place", None) is not None:
            self._own.connection.close()
            self._own.place = None

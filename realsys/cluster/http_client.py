"""HttpClient: how every client of a trial's HTTP services makes a call.

    lease? ──> POST or GET, signed, within a time limit ──> status 200: the body, at most MAX_REPLY bytes
                                                            └── else CallFailed: status and one line

A client adds to this what its reply means, and whether to try again (``attempts``).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import io
import time
from collections.abc import AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Self

import aiohttp
import msgspec
from starlette.types import Scope
from yarl import URL

from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED

MAX_REPLY = 1 << 30  # bytes; 64 answers of 32,768 tokens are 90 MB
_CONNECT_TIMEOUT_S = 10.0
_IN_ONE_GO = 1 << 19  # bytes of a request
_SHOWN = 300  # characters of a reply that is not the JSON of an error
_HEADERS = {"Content-Type": "application/json"}
#: Receives a line of a reply without its end.
OnLine = Callable[[bytes], None]
_PLAIN = {"Accept-Encoding": "identity"}  # unpacked, a reply that is small on the wire could have any size


class CallFailed(Exception):
    """A call without a usable reply. ``status`` is 0 if no reply came. ``reason`` and the message are one line each.

    ``timed_out``: no reply came within the time limit, and no connection broke.
    ``unreachable``: no connection was made.
    ``retry_after_s``: seconds after which the service wants the next call, 0 if it did not say.
    """

    def __init__(
        self,
        reason: str,
        status: int = 0,
        *,
        timed_out: bool = False,
        unreachable: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        self.reason = reason
        self.status = status
        self.timed_out = timed_out
        self.unreachable = unreachable
        self.retry_after_s = retry_after_s
        super().__init__(f"status {status}: {reason}" if status else reason)


class HttpClient:
    """One session, made with the first call. Close it, or use it as a context manager."""

    def __init__(
        self,
        token: str | None = None,
        *,
        key: str = "",
        check_alive: CheckAlive = unleased,
        faults: Callable[[bool], str] = lambda replied: "",
        reuse: bool = True,
        max_reply: int = 0,
    ) -> None:
        """``token`` signs the requests, and is not sent. ``key`` is sent with each, to a service outside of the trial.

        ``faults`` names the fault of a test, "" for none; called with False before a request, True after a reply.

        ``reuse``: idle connections are used again. If the server closes one at that moment, the request is lost.
        ``max_reply``: bytes of a reply; 0: MAX_REPLY.
        """
        self._token = token
        self._headers = {**_HEADERS, "Authorization": f"Bearer {key}"} if key else _HEADERS
        self._check_alive = check_alive
        self._faults = faults
        self._reuse = reuse
        self._max_reply = max_reply or MAX_REPLY
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        url: str,
        body: object,
        timeout_s: float,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
        on_line: OnLine | None = None,
    ) -> bytes:
        """POST ``body`` as JSON, or GET if it is None. Returns the body of the reply.

        With ``on_line`` the reply may begin with lines: ``on_line`` gets each when it arrives, without its end, and
        the rest is returned. ``timeout_s`` then bounds the time without a byte from the server, not the whole call.
        Raises CallFailed for any status but 200, and if no reply comes. Raises Fenced without a lease.
        """
        data = None if body is None else msgspec.json.encode(body)
        repeat = 1
        fault = self._faults(False)
        self._check_alive()  # immediately before the call: a process without its lease must change nothing
        try:
            match fault:
                case "drop":
                    raise ConnectionResetError("the request was lost")
                case "duplicate":
                    repeat = 2
                case "garbage":
                    data = b"{\xff"
            for _ in range(repeat):
                status, payload, headers = await self._exchange(url, data, (timeout_s, connect_timeout_s), on_line)
            match self._faults(True):
                case "drop":
                    raise ConnectionResetError("the reply was lost")
                case "garbage":
                    payload = b"{\xff"
        except TimeoutError as error:
            what = "no answer" if on_line is None else "no answer and no progress"
            raise CallFailed(f"{what} within {timeout_s:g} s", timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            unreachable = isinstance(error, aiohttp.ClientConnectorError)
            raise CallFailed(
                f"connection failed: {str(error) or type(error).__name__}", unreachable=unreachable
            ) from error
        if status != 200:
            raise CallFailed(reason_of(payload), status, retry_after_s=retry_after_s(headers, time.time()))
        return payload

    async def answers(self, url: str, timeout_s: float) -> bool:
        """Return True if a GET is answered with status 200 within ``timeout_s``."""
        try:
            await self.call(url, None, timeout_s)
        except CallFailed:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _exchange(
        self, url: str, data: bytes | None, bounds_s: tuple[float, float], on_line: OnLine | None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, body and headers. ``bounds_s``: of the call (or of its silence), and of the connection."""
        if self._session is None:
            self._session = _open_session(self._headers, force_close=not self._reuse)
        limit_s, connect_s = bounds_s
        total_s, silence_s = (limit_s, None) if on_line is None else (None, limit_s)
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=silence_s)
        method = "GET" if data is None else "POST"
        # aiohttp copies bytes into the socket's buffer in one go, and warns of that; a file is sent in pieces.
        body = io.BytesIO(data) if data is not None and len(data) > _IN_ONE_GO else data
        signed = {"Authorization": authorization(self._token, method, url, data or b"")} if self._token else {}
        async with self._session.request(method, url, data=body, headers=signed, timeout=timeout) as response:
            on_line = on_line if response.status == 200 else None
            return response.status, await _read_reply(response, on_line, self._max_reply), response.headers


def _open_session(headers: Mapping[str, str], **connector: bool) -> aiohttp.ClientSession:
    """Return a session. No limit on connections: hundreds of calls wait on one service, which has its own limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connector),  # type: ignore[arg-type]
        headers={**headers, **_PLAIN},
        auto_decompress=False,
    )


async def attempts(limit_s: float, first_delay_s: float = 0.05, last_delay_s: float = 1.0) -> AsyncIterator[int]:
    """Yield 0, 1, 2, ... and sleep in between, twice as long each time; end when ``limit_s`` are over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    number, delay = 0, first_delay_s
    while True:
        yield number
        left = deadline - loop.time()
        if left <= 0:
            return
        await asyncio.sleep(min(delay, left))
        number, delay = number + 1, min(2 * delay, last_delay_s)


async def _read_reply(response: aiohttp.ClientResponse, on_line: OnLine | None, limit: int) -> bytes:
    """Return the whole body, or what follows its lines. Raises aiohttp.ClientPayloadError once it is too large."""
    if (response.content_length or 0) > limit:
        raise _too_large(response, limit)
    body, size = bytearray(), 0
    async for piece in response.content.iter_any():
        body += piece
        size += len(piece)
        if size > limit:
            raise _too_large(response, limit)
        while on_line is not None and (end := body.find(b"\n")) >= 0:
            on_line(bytes(body[:end]))
            del body[: end + 1]
    return bytes(body)


def retry_after_s(headers: Mapping[str, str], now: float) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 without a usable one. ``now``: unix time."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, seconds)


def reason_of(payload: bytes) -> str:
    """Return the message of an error reply in one line, in whatever form the service puts it."""
    try:
        reply = msgspec.json.decode(payload)
    except MALFORMED:
        text = payload[:_SHOWN].decode("utf-8", "replace")
    else:
        error = reply.get("error", reply) if isinstance(reply, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else ""
    return " ".join(text.split()) or "no reason given"


def _too_large(response: aiohttp.ClientResponse, limit: int) -> aiohttp.ClientPayloadError:
    response.close()
    return aiohttp.ClientPayloadError(f"the reply is over the limit of {limit} bytes")


# ---- signatures of requests: a client proves that it knows the trial's token, and does not send it
#
#     Authorization: Realsys DIGEST SIGNATURE     of the body; HMAC of method, host:port, path with query, and DIGEST
#
# After the death of a service another user may listen at its port. What a client sends there is of little use: a
# signature holds for one request of one address. There it may be repeated; docs/security.md says what that does.


SCHEME = b"Realsys "


def authorization(token: str, method: str, url: str, body: bytes = b"") -> str:
    """Return the value of the header ``Authorization`` for one request."""
    target, digest = URL(url), hashlib.sha256(body).hexdigest().encode()
    host = (target.host_port_subcomponent or "").encode()
    signature = _sign(token, method, host, target.raw_path_qs.encode(), digest)
    return (SCHEME + digest + b" " + signature).decode()


def signed_digest(token: str, scope: Scope, host: bytes, given: bytes) -> bytes:
    """Return the hexadecimal SHA-256 that the body of a signed request has, b"" if its signature does not hold here.

    ``host``: header ``Host``. ``given``: header ``Authorization``.
    """
    digest, _, signature = given.removeprefix(SCHEME).partition(b" ")
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    is_right = hmac.compare_digest(signature, _sign(token, scope["method"], host, target, digest))
    try:
        return digest if is_right and _is_own(host, scope["server"]) else b""
    except ValueError:  # no address has that form: services advertise no names
        return b""


def _sign(token: str, method: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"\n".join([method.encode(), *parts]), "sha256").hex().encode()


@functools.lru_cache(64)  # clients use few addresses, and only a member's request comes this far
def _is_own(host: bytes, server: tuple[str, int | None]) -> bool:
    """Return False for a request to another address, whose owner has passed it on."""
    url = URL(f"http://{host.decode('latin-1')}")  # port 80 is left out in the header
    theirs, ours = _address("127.0.0.1" if url.host == "localhost" else url.host or ""), _address(server[0])
    return url.port == server[1] and (theirs == ours or (theirs.is_loopback and ours.is_loopback))


def _address(text: str) -> IPv4Address | IPv6Address:
    """Return the address; for the form that an IPv4 address has at a socket of both families, the IPv4 address."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address

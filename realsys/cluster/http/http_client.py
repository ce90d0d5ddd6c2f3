"""What the clients of the trial's HTTP services have in common: a reply has a bound on its size, as a request has."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

MAX_REPLY = 1 << 30  # bytes; 64 answers of 32,768 tokens are 90 MB
_PLAIN = {"Accept-Encoding": "identity"}  # what is small on the wire may be anything in memory


def open_session(headers: Mapping[str, str], **connector: float) -> aiohttp.ClientSession:
    """``connector``: of aiohttp's. Hundreds of calls wait on one service at a time: no limit but the service's own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connector),  # type: ignore[arg-type]
        headers={**headers, **_PLAIN},
        auto_decompress=False,
    )


async def read_reply(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises aiohttp.ClientPayloadError as soon as it is known to be too large."""
    if (response.content_length or 0) > MAX_REPLY:
        raise _too_large(response)
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_REPLY:
            raise _too_large(response)
    return bytes(body)


def _too_large(response: aiohttp.ClientResponse) -> aiohttp.ClientPayloadError:
    response.close()
    return aiohttp.ClientPayloadError(f"the reply is over the limit of {MAX_REPLY} bytes")

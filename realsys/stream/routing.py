"""Calls by handle: shards, DP heads and plain indices, as the routing table of the topology names them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from realsys.errors import StreamError
from realsys.stream.codec import encode_message
from realsys.stream.master_stream import MasterStream

Reply = TypeVar("Reply", bound=msgspec.Struct)
Handle = str | int


class RoutedStream:
    """A MasterStream with a routing table (``cluster.topology.routing_table``): handle -> worker index."""

    def __init__(self, stream: MasterStream, table: Mapping[str, int]) -> None:
        self._stream, self._table = stream, dict(table)

    def worker(self, handle: Handle) -> int:
        """The worker behind ``handle`` (``__data0__``, ``actor@d0t0p0``, ``"3"``, 3)."""
        try:
            return self._table[str(handle)]
        except KeyError:
            known = ", ".join(sorted(self._table))
            raise StreamError(f"no worker for handle={handle!r}; the routing table has {known}") from None

    def request(
        self,
        handle: Handle,
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[Reply]:
        """``MasterStream.request`` to the worker behind ``handle``."""
        return self._stream.request(self.worker(handle), handler, payload, reply_type, timeout_s=timeout_s)

    async def broadcast(
        self,
        handles: Iterable[Handle],
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Send one call to every worker behind ``handles``, once each, and return the replies in that order.

        All are sent before anything is awaited, so concurrent broadcasts reach every worker in one order. The first
        failure is raised at once: the other ranks may wait in a collective for the one that failed.
        """
        workers = list(dict.fromkeys(self.worker(handle) for handle in handles))
        data = encode_message(payload)
        replies = [self._stream.request_encoded(w, handler, data, reply_type, timeout_s=timeout_s) for w in workers]
        return await gather_or_first_failure(replies)


async def gather_or_first_failure(replies: list[asyncio.Future[Reply]]) -> list[Reply]:
    """Results in order; on the first failure give up the others and raise it."""
    try:
        return list(await asyncio.gather(*replies))
    finally:
        for reply in replies:
            if reply.done():
                if not reply.cancelled():
                    reply.exception()  # seen: a second failure is a consequence of the first
            else:
                reply.cancel()

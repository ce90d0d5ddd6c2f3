"""Calls by handle: shards, DP heads and plain indices, in the names of the topology's routing table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from realsys.errors import StreamError
from realsys.stream.codec import encode_message
from realsys.stream.master.master_stream import MasterStream

Reply = TypeVar("Reply", bound=msgspec.Struct)
Handle = str | int


class RoutedStream:
    """A MasterStream with a routing table (``cluster.topology.routing_table``): handle -> worker index."""

    def __init__(self, stream: MasterStream, table: Mapping[str, int]) -> None:
        self._stream, self._table = stream, dict(table)

    def worker(self, handle: Handle) -> int:
        """Return the worker behind ``handle`` (``__data0__``, ``actor@d0t0p0``, ``"3"``, 3)."""
        try:
            return self._table[str(handle)]
        except KeyError:
            handles = ", ".join(sorted(self._table))
            raise StreamError(f"no worker for handle={handle!r}: use one of the routing table: {handles}") from None

    def request(
        self,
        handle: Handle,
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a call to the worker behind ``handle``, as ``MasterStream.request`` does."""
        return self._stream.request(self.worker(handle), handler, payload, reply_type, timeout_s=timeout_s)

    def broadcast(
        self,
        handles: Iterable[Handle],
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[list[Reply]]:
        """Send one call to every worker behind ``handles`` and return the future of all replies, in order.

        A worker behind several handles gets the call once. All calls are sent before this returns, so
        broadcasts reach every worker in the order in which they were made. The future fails with the
        first failure, because the other ranks may wait in a collective for the rank that failed.
        """
        workers = [self.worker(handle) for handle in handles]
        return self.scatter(dict.fromkeys(workers, encode_message(payload)), handler, reply_type, timeout_s=timeout_s)

    def scatter(
        self, payloads: Mapping[int, bytes], handler: str, reply_type: type[Reply], *, timeout_s: float | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Send each worker its own encoded payload of one call; otherwise as ``broadcast``."""
        return self._stream.scatter(payloads, handler, reply_type, timeout_s=timeout_s)

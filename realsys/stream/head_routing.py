"""Calls by handle: shards, DP heads and plain indices, as the routing table of the topology names them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
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

    def broadcast(
        self,
        handles: Iterable[Handle],
        handler: str,
        payload: msgspec.Struct,
        reply_type: type[Reply],
        *,
        timeout_s: float | None = None,
    ) -> asyncio.Future[list[Reply]]:
        """Send one call now to every worker behind ``handles``, once each; the future is the replies in that order.

        All are sent before this returns, so broadcasts reach every worker in the order in which they were made. The
        first failure is raised at once: the other ranks may wait in a collective for the one that failed.
        """
        workers = list(dict.fromkeys(self.worker(handle) for handle in handles))
        data = encode_message(payload)
        replies = [self._stream.request_encoded(w, handler, data, reply_type, timeout_s=timeout_s) for w in workers]
        return gather_or_first_failure(replies)


def gather_or_first_failure(replies: Sequence[asyncio.Future[Reply]]) -> asyncio.Future[list[Reply]]:
    """A future of all results in order. It fails with the first failure; the others are then given up."""
    gathered = asyncio.gather(*replies)  # also looks at the failures after the first: those are its consequences

    def give_up(_: object) -> None:
        for reply in replies:
            reply.cancel()

    gathered.add_done_callback(give_up)
    return gathered

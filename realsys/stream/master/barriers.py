"""Waits of the master for workers to connect."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from collections.abc import Set as AbstractSet


class Barriers:
    """The open waits. ``here``: a live view of the workers that have connected."""

    def __init__(self, here: AbstractSet[int]) -> None:
        self._here = here
        self._open: dict[asyncio.Future[None], frozenset[int]] = {}

    async def wait(self, workers: Collection[int], timeout_s: float) -> None:
        """Return when all ``workers`` have connected. Raises TimeoutError."""
        complete = asyncio.get_running_loop().create_future()
        self._open[complete] = frozenset(workers)
        self.check()
        try:
            async with asyncio.timeout(timeout_s):
                await complete
        finally:
            del self._open[complete]

    def check(self) -> None:
        """Complete the waits whose workers have all connected."""
        for complete, workers in self._open.items():
            if not complete.done() and workers <= self._here:
                complete.set_result(None)

    def end(self, error: Exception) -> None:
        """Raise ``error`` in all waits."""
        for complete in self._open:
            if not complete.done():
                complete.set_exception(error)

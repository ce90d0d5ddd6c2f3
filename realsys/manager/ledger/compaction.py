"""Compaction of the journal: one snapshot record replaces the records before it (steps: ``journal``)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import msgspec

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import LedgerError
from realsys.manager.ledger.events import Snapshot
from realsys.manager.ledger.journal import Journal, encode_record, lock, twin_path

log = logging.getLogger(__name__)


class Compactor:
    """Compacts in the background. The event loop only waits for a copy of the columns and of the tail."""

    def __init__(self, journal: Journal, limit: int) -> None:
        """``limit``: bytes above which the journal is compacted, unless half of it is the last snapshot."""
        self._journal = journal
        self._limit = limit
        self._retry_above = 0  # bytes; after a failed compaction the journal must grow first

    @property
    def due(self) -> bool:
        """True when the journal is too large."""
        return self._journal.size > max(self._limit, 2 * self._journal.base, self._retry_above)

    async def compact(self, take: Callable[[], Snapshot], check_alive: CheckAlive = unleased) -> bool:
        """Compact once. ``take`` returns the state as of the last record.

        Returns False, and logs, when the disk does not allow it: the journal stays as it was. Raises LedgerError when
        the new file is in place and cannot be synced. Raises what ``check_alive`` raises: on a file system without
        locks, a successor may have appended to the file.
        """
        journal, begin, before = self._journal, time.perf_counter(), self._journal.size
        snapshot = msgspec.structs.replace(take(), chain=journal.chain)
        held = time.perf_counter() - begin
        try:
            twin, base = await self._written(snapshot)
            journal.copy_tail(before, twin)
            # Sync only the twin: an error of the journal must not look like one of the compaction.
            await asyncio.to_thread(_sync_and_close, os.dup(twin))
            check_alive()
            if not journal.switch(base):
                raise LedgerError("the disk is full")
        except (OSError, LedgerError) as error:
            journal.drop_twin()
            self._retry_above = before + self._limit
            log.warning("ledger %s: not compacted, and used as it is: %s", journal.path, error)
            return False
        except BaseException:
            journal.drop_twin()
            raise
        await asyncio.to_thread(journal.sync)
        log.info(
            "ledger: %d records in %d bytes compacted to %d in %.3f s; the event loop waited %.4f s for a copy",
            snapshot.records, before, journal.size, time.perf_counter() - begin, held,
        )  # fmt: skip
        return True

    async def _written(self, snapshot: Snapshot) -> tuple[int, int]:
        """Run ``_write`` in a thread. A cancellation waits for it, because a thread cannot be stopped."""
        task = asyncio.ensure_future(asyncio.to_thread(self._write, snapshot))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            os.close((await task)[0])
            raise

    def _write(self, snapshot: Snapshot) -> tuple[int, int]:
        """Write the twin with its snapshot, locked and synced. Returns its open descriptor and its bytes."""
        path, record = twin_path(self._journal.path), encode_record(snapshot)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            lock(fd, path)
            left = memoryview(record)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd, len(record)


def _sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

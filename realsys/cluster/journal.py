"""Append-only files of records, one per line, each with its checksum: the ledger, and calls of the training service.

    {crc32 of the JSON, seeded with that of the record before, 8 hex digits} {JSON}\n

A record is a msgspec Struct; one with a field ``chain`` is a snapshot, which stands for the records before it.
The chained checksums detect a missing, repeated or moved record like a changed one. A record is written (to the page
cache: it survives the death of the process) before the call that caused it is answered; ``sync`` makes it survive the
death of the machine. Opening the file cuts off a torn last record; any other damage is an error, because the records
after it cannot be trusted.

A compaction (``Compactor``) replaces the file by a snapshot record and the records appended since the snapshot:

    snapshot ──write (thread)──> .tmp, synced ──copy_tail──> appends go to both ──sync it (thread)──> switch: rename

At every moment the file of that name is whole and locked, and holds every record that ``sync`` has promised.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from realsys.cluster.failpoint import failpoint
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED, LedgerError

log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()

Record = TypeVar("Record", bound=msgspec.Struct)
Decode = Callable[[bytes], Record]


def encode_record(event: msgspec.Struct, before: int = 0) -> bytes:
    """Encode one line of the journal. ``before``: checksum of the record before it."""
    body = _encoder.encode(event)
    return b"%08x %b\n" % (zlib.crc32(body, before), body)


def encode_records(events: Iterable[msgspec.Struct], before: int = 0) -> tuple[bytes, int]:
    """Encode consecutive lines. Returns them, and the checksum that seeds the next line."""
    lines = []
    for event in events:
        lines.append(encode_record(event, before))
        before = _chain(lines[-1], event)
    return b"".join(lines), before


def decode_record(line: bytes, before: int, decode: Decode[Record]) -> Record | None:
    """Decode a line with its newline. None if it is torn, damaged, or follows another record."""
    event = _content(line, decode)
    return event if event is not None and _checksum(line) == zlib.crc32(line[9:-1], before) else None


def read_journal(path: Path, decode: Decode[Record]) -> Iterator[tuple[Record, int]]:
    """Yield the events with the offset after each, up to a torn tail. Raises LedgerError on any other damage."""
    return ((event, end) for event, end, _ in _read(path, decode))


def _read(path: Path, decode: Decode[Record]) -> Iterator[tuple[Record, int, int]]:
    """Yield what ``read_journal`` yields, with the checksum that seeds the next record."""
    offset, bad, before = 0, 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            event = decode_record(line, before, decode)
            if event is not None and not bad:
                before = _chain(line, event)
                offset += len(line)
                yield event, offset, before
                continue
            if event is not None:
                why = f"line {bad} is damaged and line {number} after it is not: not a torn tail"
            elif not bad and _content(line, decode) is not None:
                why = f"line {number} was changed, or records before it are missing or moved"
            else:
                bad, before = bad or number, _checksum(line)
                continue
            raise LedgerError(f"ledger {path}: {why}; restore the file from a copy or start a new trial")


def _content(line: bytes, decode: Decode[Record]) -> Record | None:
    """Decode a line without its checksum. None if it is not whole."""
    if len(line) < 11 or not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    try:
        return decode(line[9:-1])
    except (ValueError, *MALFORMED):
        return None


def _checksum(line: bytes) -> int:
    """Return the checksum that the line carries, 0 without one."""
    try:
        return int(line[:8], 16)
    except ValueError:
        return 0


def _chain(line: bytes, event: msgspec.Struct) -> int:
    """Return the seed of the record after ``line``: after a snapshot, the last checksum before the snapshot."""
    chain: int | None = getattr(event, "chain", None)
    return _checksum(line) if chain is None else chain


def twin_path(path: Path) -> Path:
    """Return the file that a compaction writes."""
    return path.with_name(path.name + ".tmp")


def open_locked(path: Path) -> int:
    """Open the ledger for appending and lock it. Raises LedgerError when another manager has it.

    A compaction may rename another file to this name between open and lock: then open again.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            lock(fd, path)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock(fd: int, path: Path) -> None:
    """Lock the file. Raises LedgerError when another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(f"ledger {path}: another gserver_manager has it open; stop that one first") from None
    except OSError as error:  # some network file systems have no locks; the worker's lease still fences
        log.warning("ledger %s: cannot lock: %s", path, error.strerror)


class Journal(Generic[Record]):
    """The one writer of a file of records. Opening repairs the tail and locks the file against a second manager.

    ``size``: bytes of the file; ``base``: bytes of its leading snapshot, 0 without one; ``chain``: checksum of the last
    record, which seeds the next.
    """

    def __init__(self, path: Path, decode: Decode[Record]) -> None:
        """``decode`` raises what msgspec raises."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size = 0
        self.base = 0
        self.chain = 0
        self._broken: LedgerError | None = None  # after it, nothing more is written
        self._fd = open_locked(path)
        self._twin = -1  # the file that a compaction is about to rename to this name
        self._swap = threading.Lock()  # between ``sync`` in a thread and the exchange of the two
        self._switches = 0  # how often the file was exchanged
        self._synced_switches = 0  # how many of these exchanges are surely on the disk
        try:
            twin_path(path).unlink(missing_ok=True)  # left by a compaction whose process died
            self._events = self._repair(decode)
        except BaseException:
            os.close(self._fd)
            raise
        self.records = len(self._events)

    def replay(self) -> list[Record]:
        """Return the events that the file had when it was opened. Only the first call does."""
        events, self._events = self._events, []
        return events

    def append(self, events: Iterable[Record]) -> None:
        """Write a batch with one system call. Raises LedgerError, most often for a full disk, and then on every call.

        Later records must neither follow a missing one nor a half-written line.
        """
        events = list(events)
        if not events:
            return
        if self._broken is not None:
            raise self._broken
        data, chain = encode_records(events, self.chain)
        try:
            self._write(self._fd, data)
        except LedgerError as error:
            self._broken = error
            raise
        if self._twin >= 0:
            try:
                self._write(self._twin, data)
            except LedgerError as error:  # the journal itself is whole, so only the compaction ends
                log.warning("%s; compaction cancelled", error)
                self.drop_twin()
        self.size, self.chain = self.size + len(data), chain
        self.records += len(events)

    def sync(self) -> None:
        """fsync; slow, call it off the event loop. Raises LedgerError; then nothing more is written."""
        with self._swap:
            copies = [os.dup(fd) for fd in (self._fd, self._twin) if fd >= 0]
            switches = self._switches
        try:
            failpoint("manager.sync")
            if switches > self._synced_switches:  # until the rename is on the disk, the name may lead to the old file
                copies.append(os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for fd in copies:
                os.fsync(fd)
            self._synced_switches = max(switches, self._synced_switches)
        except OSError as error:
            self._broken = LedgerError(f"ledger {self.path}: cannot sync: {error.strerror}")
            raise self._broken from error
        finally:
            for fd in copies:
                os.close(fd)

    def copy_tail(self, start: int, twin: int) -> None:
        """Copy the records after offset ``start`` to the open file ``twin``, which gets every later record, too."""
        self._twin = twin
        data = os.pread(self._fd, self.size - start, start)
        if len(data) != self.size - start:
            raise LedgerError(
                f"ledger {self.path}: read {len(data)} of {self.size - start} bytes: another process cut it"
            )
        if data:
            self._write(twin, data)

    def switch(self, base: int) -> bool:
        """Rename the twin, which begins with a snapshot of ``base`` bytes, to this file. False if it was dropped."""
        if self._twin < 0:
            return False
        twin_path(self.path).rename(self.path)
        with self._swap:
            old, self._fd, self._twin = self._fd, self._twin, -1
            self._switches += 1
        os.close(old)
        self.size, self.base = os.fstat(self._fd).st_size, base
        return True

    def drop_twin(self) -> None:
        """Cancel a compaction; the file stays as it is."""
        with self._swap:
            twin, self._twin = self._twin, -1
        if twin >= 0:
            os.close(twin)
        twin_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            self.drop_twin()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, fd: int, data: bytes) -> None:
        try:
            failpoint("manager.journal")
            written = os.write(fd, data)
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: cannot write {len(data)} bytes: {error.strerror}") from error
        if written != len(data):
            raise LedgerError(f"ledger {self.path}: wrote {written} of {len(data)} bytes: disk full?")

    def _repair(self, decode: Decode[Record]) -> list[Record]:
        events: list[Record] = []
        end = chain = 0
        for event, end, chain in _read(self.path, decode):  # noqa: B007 (used after the loop)
            events.append(event)
            if len(events) == 1 and hasattr(event, "chain"):
                self.base = end
        self.size, self.chain = end, chain
        torn = os.fstat(self._fd).st_size - end
        if torn:
            log.warning("ledger %s: cut a torn tail of %d bytes after %d records", self.path, torn, len(events))
            os.ftruncate(self._fd, end)
        return events


# ---- compaction


class Compactor:
    """Compacts in the background. The event loop only waits for a copy of the columns and of the tail."""

    def __init__(self, journal: Journal[Any], limit: int) -> None:
        """``limit``: bytes above which the journal is compacted, unless half of it is the last snapshot."""
        self._journal = journal
        self._limit = limit
        self._retry_above = 0  # bytes; after a failed compaction the journal must grow first

    @property
    def due(self) -> bool:
        """True when the journal is too large."""
        return self._journal.size > max(self._limit, 2 * self._journal.base, self._retry_above)

    async def compact(self, take: Callable[[], Any], check_alive: CheckAlive = unleased) -> bool:
        """Compact once. ``take`` returns the state as of the last record: a struct with ``records``, their number, and
        ``chain``.

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

    async def _written(self, snapshot: msgspec.Struct) -> tuple[int, int]:
        """Run ``_write`` in a thread. A cancellation waits for it, because a thread cannot be stopped."""
        task = asyncio.ensure_future(asyncio.to_thread(self._write, snapshot))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            os.close((await task)[0])
            raise

    def _write(self, snapshot: msgspec.Struct) -> tuple[int, int]:
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

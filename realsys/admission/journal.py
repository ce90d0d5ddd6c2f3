"""The ledger on disk: append-only, one record per line, each with its checksum.

    {crc32 of the JSON, 8 hex digits} {JSON}\\n

A record is written (to the page cache: it survives the death of the process) before the call that caused it is
answered; ``sync`` makes it survive the death of the machine. A torn last record is cut off when the file is opened;
damage further up is an error, because what follows it cannot be trusted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from realsys.admission.events import Event
from realsys.errors import LedgerError

log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_record(event: Event) -> bytes:
    """One line of the journal."""
    body = _encoder.encode(event)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def decode_record(line: bytes) -> Event | None:
    """The event of a line with its newline, None if the line is torn or damaged."""
    if len(line) < 11 or not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    body = line[9:-1]
    try:
        if int(line[:8], 16) != zlib.crc32(body):
            return None
        return _decoder.decode(body)
    except (ValueError, msgspec.DecodeError):
        return None


def read_journal(path: Path) -> Iterator[tuple[Event, int]]:
    """Events with the offset after each. Ends before a torn tail; raises LedgerError on damage that is not the tail."""
    offset, bad = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            event = decode_record(line)
            if event is None:
                bad = bad or number
                continue
            if bad:
                raise LedgerError(
                    f"ledger {path}: line {bad} is damaged and line {number} after it is not: not a torn tail; "
                    "restore the file from a copy or start a new trial"
                )
            offset += len(line)
            yield event, offset


class Journal:
    """The one writer of a ledger file. Opening repairs the tail and locks the file against a second manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self._events = self._repair()
        except BaseException:
            os.close(self._fd)
            raise
        self.records = len(self._events)

    def replay(self) -> list[Event]:
        """What was in the file when it was opened. Once: the list is handed over."""
        events, self._events = self._events, []
        return events

    def append(self, events: Iterable[Event]) -> None:
        """Write a batch with one system call. Raises LedgerError (a full disk above all); the caller must stop then."""
        records = [encode_record(event) for event in events]
        if not records:
            return
        data = b"".join(records)
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise LedgerError(f"ledger {self.path}: cannot write {len(data)} bytes: {error.strerror}") from error
        if written != len(data):
            raise LedgerError(f"ledger {self.path}: wrote {written} of {len(data)} bytes: disk full?")
        self.records += len(records)

    def sync(self) -> None:
        """fsync; slow, call it off the event loop."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"ledger {self.path}: another gserver_manager has it open; stop that one first") from None
        except OSError as error:  # some network file systems have no locks; the worker's lease still fences
            log.warning("ledger %s: cannot lock: %s", self.path, error.strerror)

    def _repair(self) -> list[Event]:
        events, end = [], 0
        for event, end in read_journal(self.path):  # noqa: B007 (the last offset is wanted)
            events.append(event)
        torn = os.fstat(self._fd).st_size - end
        if torn:
            log.warning("ledger %s: cut a torn tail of %d bytes after %d records", self.path, torn, len(events))
            os.ftruncate(self._fd, end)
        return events

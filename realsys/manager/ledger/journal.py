"""The ledger on disk: the events of ``realsys.manager.ledger.events`` as records of ``realsys.cluster.journal``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from realsys.cluster import journal
from realsys.manager.ledger.events import Event

_decode = msgspec.json.Decoder[Event](Event).decode


class Journal(journal.Journal[Event]):
    """The one writer of a ledger file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _decode)


def decode_record(line: bytes, before: int = 0) -> Event | None:
    """Decode a line with its newline. None if it is torn, damaged, or follows another record."""
    return journal.decode_record(line, before, _decode)


def read_journal(path: Path) -> Iterator[tuple[Event, int]]:
    """Yield the events with the offset after each, up to a torn tail. Raises LedgerError on any other damage."""
    return journal.read_journal(path, _decode)

"""The ledger's file: checksums, torn tails, damage, one writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.errors import LedgerError
from realsys.manager.ledger.events import (
    EvalAnswered,
    EvalHeld,
    EvalStarted,
    Event,
    Finished,
    Granted,
    Reissued,
    RolledBack,
    Trained,
)
from realsys.manager.ledger.journal import Journal, decode_record, encode_record, read_journal
from realsys.types import PublishedVersion

EVENTS: list[Event] = [
    Granted("0000000000", 0, 7, 0, "rollout_worker/0", "1", 0, 1.5),
    Finished("0000000000", 0, "failed", 'line\n"quoted" \u00e9', True, 2.0),
    Reissued("0000000000", 0, "lease lapsed", 2.5),
    Trained(1, 1, ["0000000000"], 3.0),
    EvalStarted("before", "eval", 4, 0, 0, 3.5),
    EvalHeld("before", PublishedVersion(0, "1", "/v0", 0), 3.75),
    EvalAnswered("before", 2, False, True, 12, 0, 1),
]


def written(path: Path, events: list[Event] = EVENTS) -> bytes:
    with Journal(path) as journal:
        journal.append(events)
    return path.read_bytes()


def test_replay_gives_back_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "made" / "ledger.jsonl"
    written(path)
    with Journal(path) as journal:
        assert journal.replay() == EVENTS and journal.records == len(EVENTS)
        journal.append(EVENTS[:1])
    assert [event for event, _ in read_journal(path)] == [*EVENTS, EVENTS[0]]


def test_every_torn_last_record_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    content = written(path)
    last = len(encode_record(EVENTS[-1]))
    for cut in range(len(content) - last, len(content)):
        path.write_bytes(content[:cut])
        with Journal(path) as journal:
            assert journal.replay() == EVENTS[:-1], cut
            journal.append(EVENTS[-1:])
        assert path.read_bytes() == content


def test_zeros_after_a_crash_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    content = written(path)
    path.write_bytes(content + b"\0" * 100)
    with Journal(path) as journal:
        assert journal.replay() == EVENTS
    assert path.read_bytes() == content


def test_any_flipped_bit_is_noticed() -> None:
    line = encode_record(EVENTS[0])
    for position in range(len(line)):
        damaged = bytearray(line)
        damaged[position] ^= 1
        assert decode_record(bytes(damaged)) in (None, EVENTS[0])  # the checksum's own letter case may change


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"failed", b"fooled", r"ledger\.jsonl: line 2 is damaged"),
        # the last line is whole: a write that was torn has no end, and cut off it would be lost without a word
        (b'"length":12', b'"length":13', "line 7 was changed, or records before it are missing"),
    ],
)
def test_changed_record_names_its_line(tmp_path: Path, old: bytes, new: bytes, problem: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(written(path).replace(old, new, 1))
    with pytest.raises(LedgerError, match=problem):
        Journal(path)


@pytest.mark.parametrize("written_bytes", [0, 20])
def test_no_record_follows_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int) -> None:
    """The disk has room again before the process has ended: what comes now must not follow a hole or half a line."""
    path, write = tmp_path / "ledger.jsonl", os.write

    def full(fd: int, data: bytes) -> int:
        if not written_bytes:
            raise OSError(28, "No space left on device")
        return write(fd, data[:written_bytes])

    with Journal(path) as journal:
        journal.append(EVENTS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(LedgerError, match=r"cannot write|disk full"):
                journal.append(EVENTS[1:2])
        with pytest.raises(LedgerError, match=r"cannot write|disk full"):
            journal.append(EVENTS[2:])
    with Journal(path) as journal:
        assert journal.replay() == EVENTS[:1]


def test_numbers_that_no_ledger_can_hold_are_damage() -> None:
    for event in (
        Trained(1 << 31, 1, ["0000000000"], 3.0),
        Trained(1, 1, ["0000000000"], 3.0, [1 << 40]),
        Granted("0000000000", -1, 7, 0, "w", "1", 0, 1.5),
        Granted("0000000000", 0, 1 << 63, 0, "w", "1", 0, 1.5),
        RolledBack(-2, 0, "1", "", 0.0),
    ):
        assert decode_record(encode_record(event)) is None, event


def test_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Journal(path) as first:
        with pytest.raises(LedgerError, match="another gserver_manager"):
            Journal(path)
        first.append(EVENTS)
    assert len(list(read_journal(path))) == len(EVENTS)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    before = len(os.listdir("/proc/self/fd"))
    written(path)
    path.write_bytes(b"damaged\n" + encode_record(EVENTS[0]))
    with pytest.raises(LedgerError):
        Journal(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_append_after_close_says_what_is_wrong(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "ledger.jsonl")
    journal.close()
    with pytest.raises(LedgerError, match="cannot write"):
        journal.append(EVENTS)

"""Tracker ``tensorboard``: event files in the folder ``tensorboard`` of the trial. ``tensorboard --logdir`` reads them.

Each kind of record has its own folder, because a roll-back discards the steps of a folder: training and
evaluations go back, the warm-up does not.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from realsys.observe.trackers.contract import Point, Run, Tracker


class TensorBoardTracker(Tracker):
    """Writer of event files. A new start or a roll-back begins a new file, which names the steps that it discards."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._files: dict[str, EventFile] = {}
        for kind, step in run.delivered.items():
            self._restart(kind, step + 1)  # points that were written and not noted are delivered again

    def log(self, point: Point) -> None:
        if point.kind not in self._files:
            self._restart(point.kind, 0)  # also over the files of a start that was killed before its first position
        self._files[point.kind].scalars(point.step, point.time, point.metrics)

    def roll_back(self, step: int) -> None:
        for kind in [kind for kind in self._files if kind != "warmup" or step < 0]:
            self._restart(kind, step + 1)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, status: str) -> None:
        for file in self._files.values():
            file.close()

    def _restart(self, kind: str, step: int) -> None:
        if kind in self._files:
            self._files[kind].close()
        self._files[kind] = EventFile(self.run.folder / "tensorboard" / kind)
        self._files[kind].restart(max(0, step))


# ---- writer of TensorBoard's event files: scalars, and the mark that discards later steps
#
# A file is a sequence of records, each with a length and two checksums (TFRecord). A record is a protobuf message
# ``tensorflow.Event``. The few fields that scalars need are encoded here: the libraries that write them take a second
# of CPU time to import, and this takes none.
#
#     Event      1 wall_time (double)   2 step (int64)   3 file_version (string)   5 summary   7 session_log
#     Summary    1 value, repeated      Value   1 tag (string)   2 simple_value (float)
#     SessionLog 1 status (enum)        START = 1: readers discard what earlier files have at this step and later


_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_START = b"\x08\x01"  # SessionLog(status=START)


class EventFile:
    """A new event file in ``folder``, which is made. Readers follow it while it grows."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() / 1e9:020.9f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._write(_double(1, time.time()) + _text(3, "brain.Event:2"))

    def scalars(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Write the scalars of one step. ``when``: unix seconds."""
        summary = b"".join(_value_of(tag) + struct.pack("<f", value) for tag, value in _in_range(values))
        self._write(_double(1, when) + _integer(2, step) + _message(5, summary))

    def restart(self, step: int) -> None:
        """Have readers discard what earlier files of the folder have at ``step`` and later."""
        self._write(_double(1, time.time()) + _integer(2, step) + _message(7, _START))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event)))


def _in_range(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the values that a float32 can hold."""
    for tag, value in values.items():
        if abs(value) < 3.4e38:
            yield tag, value


def _key(field: int, wire: int) -> bytes:
    return bytes([field << 3 | wire])


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative numbers as two's complement
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _integer(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _key(field, _DOUBLE) + struct.pack("<d", number)


def _message(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


@lru_cache(4096)
def _value_of(tag: str) -> bytes:
    """Return an entry of a Summary without its number, which is at its end."""
    entry = _text(1, tag) + _key(2, _FLOAT)
    return _key(1, _BYTES) + _varint(len(entry) + 4) + entry


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()
#: the same for two bytes: half of the time
_TABLE_OF_TWO = [_TABLE[_TABLE[low] & 0xFF ^ high] ^ _TABLE[low] >> 8 for high in range(256) for low in range(256)]


def _masked(content: bytes) -> int:
    """Return the checksum of TFRecord: CRC-32C, rotated and shifted."""
    crc, table = 0xFFFFFFFF, _TABLE_OF_TWO
    even = len(content) & ~1
    for (two,) in struct.iter_unpack("<H", content[:even]):
        crc = table[(crc ^ two) & 0xFFFF] ^ crc >> 16
    for byte in content[even:]:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

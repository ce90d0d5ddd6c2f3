"""Event files of TensorBoard, byte by byte. ``tests/trackers`` reads them with TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from realsys.observe.trackers.tensorboard import EventFile, _masked, _varint


def events(path: Path) -> Iterator[bytes]:
    """Yield the events of a file, each with right checksums."""
    content = path.read_bytes()
    while content:
        (length,), event = struct.unpack("<Q", content[:8]), content[12:]
        event, rest = event[:length], event[length:]
        assert struct.unpack("<I", content[8:12])[0] == _masked(content[:8])
        assert struct.unpack("<I", rest[:4])[0] == _masked(event)
        content = rest[4:]
        yield event


def test_checksum_is_masked_crc_32c() -> None:
    crc = 0xE3069283  # check value of CRC-32C
    assert _masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_integers_are_varints() -> None:
    assert (_varint(0), _varint(127), _varint(300)) == (b"\x00", b"\x7f", b"\xac\x02")
    assert _varint(-1) == b"\xff" * 9 + b"\x01"


def test_file_has_version_scalars_and_restart(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "train")
    file.restart(5)
    file.scalars(300, 1.0, {"train/ä": 0.5, "train/too_large": 1e300})
    file.close()
    (path,) = (tmp_path / "train").iterdir()
    version, restart, scalars = events(path)
    assert version.endswith(b"\x1a\x0dbrain.Event:2")
    assert restart.endswith(b"\x10\x05\x3a\x02\x08\x01")
    value = b"\x0a\x08" + "train/ä".encode() + b"\x15" + struct.pack("<f", 0.5)
    assert scalars == b"\x09" + struct.pack("<d", 1.0) + b"\x10\xac\x02" + b"\x2a\x11\x0a\x0f" + value


def test_later_files_have_later_names(tmp_path: Path) -> None:
    for _ in range(3):
        EventFile(tmp_path).close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 and files == sorted(files, key=lambda path: path.stat().st_mtime_ns)

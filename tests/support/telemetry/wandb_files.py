"""Reader of the file that W&B writes offline: records of protobuf in blocks, as in the log of LevelDB."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7  # of the file, and of each part: checksum, length, type
_FULL, _LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows of all offline runs in ``folder``, with their number as ``_step``, in order."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in _records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


def _records(content: bytes) -> Iterator[bytes]:
    place, joined = _HEADER, b""
    while place + _HEADER <= len(content):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of a block is padding
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        joined += content[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            yield joined
            joined = b""

"""Reads single rows of a recorded step: a viewer of one sample must not load the whole batch.

A worker's file has one tensor per key, with the samples one after the other. Header and index say where a sample's part
is, so only these bytes are read. Each part is checked against its checksum.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from realsys.errors import MALFORMED, RecordError
from realsys.train.data_manager import Array
from realsys.train.records.record_files import INDEX, RECORD, ArrayPart, StepRecord, WorkerIndex, checksum
from realsys.types import GroupOrigin

_DTYPES = {"BOOL": "bool", "I32": "int32", "I64": "int64", "F32": "float32", "F64": "float64", "F16": "float16"}
_MOST_HEADER = 512 << 20  # bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one array of one sample."""

    path: Path
    offset: int
    dtype: str
    info: ArrayPart


class RowReader:
    """Reader of one recorded step. It holds the index, but no array."""

    def __init__(self, directory: Path, record: StepRecord) -> None:
        """Read the headers of all files. Raises RecordError, which names the file."""
        self._parts: dict[str, dict[str, _Part]] = {}  # sample id -> key -> part
        self.origins: dict[str, GroupOrigin] = {}  # ticket -> its group
        for name in record.files:
            self._read_header(directory / name)

    def arrays(self, sample_id: str) -> dict[str, Array]:
        """Read the arrays of a row, by key. Raises RecordError for an unknown row and a damaged array."""
        if sample_id not in self._parts:
            raise RecordError(f"sample {sample_id!r} is not in this record")
        return {key: _read(part, key) for key, part in self._parts[sample_id].items()}

    def array(self, sample_id: str, key: str) -> Array:
        """Read one array of a row. Raises as ``arrays``, and if the row has none of this key."""
        part = self._parts.get(sample_id, {}).get(key)
        if part is None:
            raise RecordError(f"sample {sample_id!r} has no array {key!r} in this record")
        return _read(part, key)

    def _read_header(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > _MOST_HEADER:
                    raise ValueError(f"its header would have {size} bytes")
                header = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
                length = os.fstat(file.fileno()).st_size
            metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
            index = msgspec.json.decode(metadata[INDEX], type=WorkerIndex)
            tensors = {key: msgspec.json.decode(header[key], type=_Tensor) for key in index.arrays}
            if any(8 + size + tensor.data_offsets[1] > length for tensor in tensors.values()):
                raise ValueError("it ends before its last array")
            for key, parts in index.arrays.items():
                self._add(path, key, tensors[key], 8 + size, parts)
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (KeyError, ValueError, *MALFORMED) as error:
            raise RecordError(f"{path} is corrupt: {type(error).__name__}: {error}; {RECORD.advice}") from None
        self.origins |= {origin.ticket.ticket_id: origin for origin in index.origins}

    def _add(self, path: Path, key: str, tensor: _Tensor, data: int, parts: list[ArrayPart]) -> None:
        dtype = _DTYPES[tensor.dtype]
        if sum(part.size for part in parts) != math.prod(tensor.shape):
            raise ValueError(f"{key} has another size than its index says")
        offset = data + tensor.data_offsets[0]
        for part in parts:
            self._parts.setdefault(part.sample_id, {})[key] = _Part(path, offset, dtype, part)
            offset += part.size * np.dtype(dtype).itemsize


class _Tensor(msgspec.Struct, frozen=True):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _read(part: _Part, key: str) -> Array:
    try:
        array = np.fromfile(part.path, np.dtype(part.dtype), part.info.size, offset=part.offset)
    except OSError as error:
        raise RecordError(f"{part.path}: cannot be read: {error.strerror or error}") from None
    if len(array) != part.info.size or checksum(array) != part.info.checksum:
        problem = f"{key} of sample {part.info.sample_id} is not what was written"
        raise RecordError(f"{part.path} is corrupt: {problem}; {RECORD.advice}")
    return array

"""Format of a recorded train step on disk. No torch.

    {trial}/record/step-00000007/     a folder as in realsys.cluster.commit_folder
        worker-00000.safetensors      arrays of the samples that this worker held: one tensor per key, the
                                      samples one after the other; WorkerIndex, in its metadata, says which
        batch.json                    StepRecord, the manifest: everything else

Nothing is synced: a record is no part of a checkpoint, and training must not wait for it. The checksums
find what a crash of the machine has damaged.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realsys.cluster.commit_folder import FolderFormat, FolderManifest, Removed, checksum_of
from realsys.config.schema import Config
from realsys.errors import MALFORMED, RecordError
from realsys.train.worker.data_manager import Array
from realsys.types import GroupOrigin, SampleMeta

BATCH = "batch.json"
INDEX = "index"  # key of the WorkerIndex in the metadata of a worker's file

Number = float | str  # JSON has no number for nan, inf and -inf: these are stored by name
Arrays = dict[tuple[str, str], Array]  # (sample id, key)


class ArrayPart(msgspec.Struct, frozen=True, array_like=True):
    """One sample's part of the tensor of a key."""

    sample_id: str
    size: int  # elements
    checksum: str  # xxh3-64 of their bytes, hex


class WorkerIndex(msgspec.Struct, frozen=True):
    """Contents of a worker's file.

    ``origins``: origin of each group that this worker received over the stream.
    """

    worker: int
    step: int
    arrays: dict[str, list[ArrayPart]]
    origins: list[GroupOrigin]


class StepRecord(FolderManifest, frozen=True):
    """Everything of a step except the arrays. Version ``version`` was trained and became ``step``.

    groups  the batch, in its order
    calls   names of the dataflow's calls that ran in this step
    plan    digest of the assignment of samples to ranks
    args    call -> its arguments
    stats   call -> its statistics
    scores  sample id -> score of a reward model, if there is one
    weights trained role -> worker -> parameter -> checksum after the step; those of the actor by HF name, as published
    time    unix seconds
    config  the whole configuration of that step; the trial's may have changed since
    """

    step: int
    version: int
    seed: int
    incarnation: str
    groups: list[list[SampleMeta]]
    calls: list[str]
    plan: str
    args: dict[str, dict[str, Any]]
    stats: dict[str, dict[str, Number]]
    scores: dict[str, Number]
    weights: dict[str, dict[int, dict[str, str]]]
    time: float
    config: dict[str, Any] = msgspec.field(default_factory=dict)


RECORD = FolderFormat(
    kind="step record",
    manifest=BATCH,
    contents=StepRecord,
    number=5,
    pattern=re.compile(r"step-(\d{8})"),
    error=RecordError,
    advice="choose another step",
    durable=False,
)

read_record = RECORD.read


def worker_file(worker: int) -> str:
    """Return the name of a worker's file."""
    return f"worker-{worker:05d}.safetensors"


def number(value: float) -> Number:
    """Return ``value`` as JSON can hold it."""
    return value if math.isfinite(value) else repr(value)


# ---- write


def encode_worker_file(
    worker: int, step: int, arrays: Mapping[tuple[str, str], Array], origins: Iterable[GroupOrigin]
) -> bytes:
    """Return the content of a worker's file.

    ``arrays``: (sample id, key) -> array, as ``DataManager.release`` returns them.
    """
    by_key: dict[str, list[tuple[str, Array]]] = {}
    for (sample_id, key), array in arrays.items():
        by_key.setdefault(key, []).append((sample_id, array))
    index = WorkerIndex(
        worker,
        step,
        {key: [ArrayPart(name, a.size, checksum(a)) for name, a in parts] for key, parts in by_key.items()},
        list(origins),
    )
    tensors = {key: np.concatenate([array for _, array in parts]) for key, parts in by_key.items()}
    return bytes(save(tensors, {INDEX: msgspec.json.encode(index).decode()}))


def checksum(array: Array) -> str:
    """Return the xxh3-64 of the array's bytes in hex."""
    return checksum_of(np.ascontiguousarray(array).view(np.uint8).data)


# ---- find


def recorded_steps(root: Path) -> dict[int, Path]:
    """Return step -> folder of every complete record under ``root``, oldest first."""
    return {_step_of(path): path for path in RECORD.complete(root)}


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def record_of_step(root: Path, step: int) -> Path:
    """Return the folder of a recorded step. Raises RecordError that lists the recorded steps."""
    steps = recorded_steps(root)
    if step not in steps:
        raise RecordError(f"{root}: step {step} is not recorded; there is {ranges(steps)}")
    return steps[step]


def ranges(steps: Iterable[int]) -> str:
    """Format steps for people: ``3-6, 8``."""
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in spans]
    return ", ".join(texts) or "no record of any step"


def discard_after(root: Path, step: int) -> Removed:
    """Delete the records of steps beyond ``step``, and the unfinished ones."""
    later = [path for path in RECORD.complete(root) if _step_of(path) > step]
    return RECORD.remove(sorted([*later, *RECORD.unfinished(root)]))


def prune(root: Path, keep: int, oldest_checkpoint: int | None) -> Removed:
    """Delete all but the newest ``keep`` records and those after the oldest checkpoint, which can be replayed."""
    steps = recorded_steps(root)
    replayable_after = max(steps, default=0) if oldest_checkpoint is None else oldest_checkpoint
    return RECORD.remove(path for step, path in list(steps.items())[:-keep] if step <= replayable_after)


# ---- read


def config_of(directory: Path, record: StepRecord) -> Config:
    """Return the configuration that the step was trained with. Raises RecordError for one of another build."""
    try:
        return Config.model_validate(record.config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"has a configuration of another build of realsys: {where}: {first['msg']}"
        raise RecordError(f"{directory / BATCH} {problem}; {RECORD.advice}") from None


def read_worker_file(directory: Path, worker: int) -> tuple[WorkerIndex, Arrays]:
    """Return the arrays of one worker. Raises RecordError, which names the file or the damaged array."""
    path = directory / worker_file(worker)
    return _parse(path, RECORD.read_bytes(path))


def read_arrays(directory: Path, record: StepRecord) -> tuple[Arrays, list[GroupOrigin]]:
    """Return all arrays of a recorded step, and the origins of its groups. Raises as ``read_worker_file``."""
    arrays: Arrays = {}
    origins: list[GroupOrigin] = []
    for name, info in record.files.items():
        path = directory / name
        data = RECORD.read_bytes(path)
        index, own = _parse(path, data)  # first: it names the array, where the file's checksum names the file
        RECORD.check_bytes(path, data, info)
        arrays |= own
        origins += index.origins
    return arrays, origins


def _parse(path: Path, data: bytes) -> tuple[WorkerIndex, Arrays]:
    try:
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
        index = msgspec.json.decode(metadata[INDEX], type=WorkerIndex)
        tensors = load(data)
        arrays = {
            (part.sample_id, key): array
            for key, parts in index.arrays.items()
            for part, array in zip(parts, _split(tensors[key], [part.size for part in parts]), strict=True)
        }
    except (SafetensorError, KeyError, ValueError, *MALFORMED) as error:
        raise RecordError(f"{path} is corrupt: {type(error).__name__}: {error}; {RECORD.advice}") from None
    for key, parts in index.arrays.items():
        for part in parts:
            if checksum(arrays[part.sample_id, key]) != part.checksum:
                problem = f"{key} of sample {part.sample_id} is not what was written"
                raise RecordError(f"{path} is corrupt: {problem}; {RECORD.advice}")
    return index, arrays


def _split(tensor: Array, sizes: list[int]) -> list[Array]:
    """Cut a tensor into parts. Raises ValueError unless the sizes add up."""
    if sum(sizes) != tensor.size:
        raise ValueError(f"{tensor.size} elements, but its index says {sum(sizes)}")
    ends = np.cumsum(sizes)
    return [tensor[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# ---- single rows: a viewer of one sample must not load the whole batch
#
# A worker's file has one tensor per key, with the samples one after the other. Header and index say where a sample's
# part is, so only these bytes are read. Each part is checked against its checksum.


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

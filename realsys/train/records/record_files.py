"""A recorded train step on disk: what is in it, how it is written, found, read and checked. No torch.

    {trial}/record/step-00000007.tmp/       while being written
    {trial}/record/step-00000007/           after commit (realsys.master.records.recorder)
        worker-00000.safetensors            arrays of the samples that lay on this worker: a tensor per key, the samples
                                            one after the other; which is which stands in its metadata (WorkerIndex)
        batch.json                          StepRecord: everything else; written last

A folder without ``.tmp`` is complete, and checksums prove it: batch.json has its own, and that of every other file.
Nothing is synced: a record is no part of a checkpoint, and what a crash of the machine tears is found when it is read.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realsys.config.schema import Config
from realsys.errors import MALFORMED, RecordError
from realsys.train.checkpoint.checkpoint_files import FileInfo
from realsys.train.data_manager import Array
from realsys.types import GroupOrigin, SampleMeta

FORMAT = 3  # another one is refused
BATCH = "batch.json"
_DIRECTORY = re.compile(r"step-(\d{8})")
_INDEX = "index"  # of the metadata of a worker's file

T = TypeVar("T")

Number = float | str  # what JSON has no number for is its name: nan, inf, -inf
Arrays = dict[tuple[str, str], Array]  # (sample id, key)


class ArrayPart(msgspec.Struct, frozen=True, array_like=True):
    """A sample's part of the tensor of a key: so many elements, with the xxh3-64 of their bytes."""

    sample_id: str
    size: int
    checksum: str


class WorkerIndex(msgspec.Struct, frozen=True):
    """What the tensors of a worker's file are. ``origins``: of the groups that the stream brought to this worker."""

    worker: int
    step: int
    arrays: dict[str, list[ArrayPart]]
    origins: list[GroupOrigin]


class StepRecord(msgspec.Struct, frozen=True):
    """What a step was, beside the arrays of its samples. Version ``version`` trained and became ``step``."""

    step: int
    version: int
    seed: int
    incarnation: str  # of the training side
    groups: list[list[SampleMeta]]  # the batch, in its order
    calls: list[str]  # of the dataflow, as far as they were run in this step
    plan: str  # digest of who worked on what
    args: dict[str, dict[str, Any]]  # call -> arguments
    stats: dict[str, dict[str, Number]]  # call -> what it reported
    scores: dict[str, Number]  # sample id -> score of a reward model, where there is one
    weights: dict[str, dict[int, dict[str, str]]]  # trained role -> worker -> parameter -> checksum after the step
    time: float  # unix seconds
    config: dict[str, Any] = {}  # all of it, as it was: the trial's may have changed since
    files: dict[str, FileInfo] = {}
    format: int = FORMAT


class _Envelope(msgspec.Struct):
    """batch.json: the record as it was encoded, and the checksum of those bytes."""

    checksum: str
    record: msgspec.Raw


def worker_file(worker: int) -> str:
    return f"worker-{worker:05d}.safetensors"


def number(value: float) -> Number:
    return value if math.isfinite(value) else repr(value)


# ---- write


def encode_worker_file(
    worker: int, step: int, arrays: Mapping[tuple[str, str], Array], origins: Iterable[GroupOrigin]
) -> bytes:
    """Content of a worker's file. ``arrays``: of (sample id, key), as ``DataManager.release`` hands them out."""
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
    return bytes(save(tensors, {_INDEX: msgspec.json.encode(index).decode()}))


def encode_record(record: StepRecord) -> bytes:
    """Content of batch.json."""
    body = msgspec.json.encode(record)
    return msgspec.json.encode(_Envelope(xxhash.xxh3_64_hexdigest(body), msgspec.Raw(body)))


def checksum(array: Array) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)


# ---- find


def recorded_steps(root: Path) -> dict[int, Path]:
    """Step -> folder of every complete record under ``root``, oldest first."""
    found = {}
    for path in root.iterdir() if root.exists() else ():
        if (match := _DIRECTORY.fullmatch(path.name)) and (path / BATCH).exists():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def record_of_step(root: Path, step: int) -> Path:
    """Raises RecordError that lists the steps there are."""
    steps = recorded_steps(root)
    if step not in steps:
        raise RecordError(f"{root}: step {step} is not recorded; there is {ranges(steps)}")
    return steps[step]


def ranges(steps: Iterable[int]) -> str:
    """For people: ``3-6, 8``."""
    spans: list[list[int]] = []
    for step in sorted(steps):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans) or "no record of any step"


def remove(path: Path) -> None:
    """batch.json goes first, so that a reader who comes meanwhile finds no record, not a broken one. Raises OSError."""
    (path / BATCH).unlink(missing_ok=True)
    shutil.rmtree(path)


def forget_after(root: Path, step: int) -> list[Path]:
    """Remove the records of steps beyond ``step``, and what was left half written; what went. Raises OSError."""
    gone = []
    for path in sorted(root.glob("step-*")) if root.exists() else ():
        match = _DIRECTORY.fullmatch(path.name)
        if match is None or int(match[1]) > step or not (path / BATCH).exists():
            remove(path)
            gone.append(path)
    return gone


def prune(root: Path, keep: int, oldest_checkpoint: int | None) -> list[Path]:
    """Remove all but the newest ``keep`` records and those after the oldest checkpoint; what went. Raises OSError."""
    steps = recorded_steps(root)
    needed = max(steps, default=0) if oldest_checkpoint is None else oldest_checkpoint
    gone = [path for step, path in list(steps.items())[:-keep] if step <= needed]
    for path in gone:
        remove(path)
    return gone


# ---- read


def read_record(directory: Path) -> StepRecord:
    """Raises RecordError when batch.json is not what was written."""
    path = directory / BATCH
    raw = _read(path)
    envelope = _decode(raw, _Envelope, path)
    if xxhash.xxh3_64_hexdigest(envelope.record) != envelope.checksum:
        raise RecordError(f"{path} is damaged: its checksum is not that of its content")
    probe = _decode(bytes(envelope.record), dict[str, msgspec.Raw], path)
    if (found := bytes(probe.get("format", b"none"))) != str(FORMAT).encode():
        raise RecordError(f"{path} has format {found.decode()}, this realsys reads {FORMAT}")
    return _decode(bytes(envelope.record), StepRecord, path)


def config_of(directory: Path, record: StepRecord) -> Config:
    """The configuration that the step was trained with. Raises RecordError for one of another realsys."""
    try:
        return Config.model_validate(record.config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(
            f"{directory / BATCH} has a configuration of another realsys: {where}: {first['msg']}"
        ) from None


def read_worker_file(directory: Path, worker: int) -> tuple[WorkerIndex, Arrays]:
    """The arrays of one worker. Raises RecordError naming the file, or the array that is not what was written."""
    path = directory / worker_file(worker)
    return _parse(path, _read(path))


def read_arrays(directory: Path, record: StepRecord) -> tuple[Arrays, list[GroupOrigin]]:
    """All arrays of a recorded step, and where its groups came from. Raises RecordError as ``read_worker_file``."""
    arrays: Arrays = {}
    origins: list[GroupOrigin] = []
    for name, info in record.files.items():
        raw = _read(directory / name)
        index, own = _parse(directory / name, raw)
        if (len(raw), xxhash.xxh3_64_hexdigest(raw)) != (info.size, info.checksum):
            raise RecordError(f"{directory / name} is damaged: it is not the file that {BATCH} says")
        arrays |= own
        origins += index.origins
    return arrays, origins


def _parse(path: Path, raw: bytes) -> tuple[WorkerIndex, Arrays]:
    try:
        header = msgspec.json.decode(raw[8 : 8 + int.from_bytes(raw[:8], "little")], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
        index = msgspec.json.decode(metadata[_INDEX], type=WorkerIndex)
        tensors = load(raw)
        arrays = {
            (part.sample_id, key): array
            for key, parts in index.arrays.items()
            for part, array in zip(parts, _split(tensors[key], [part.size for part in parts]), strict=True)
        }
    except (SafetensorError, KeyError, ValueError, *MALFORMED) as error:
        raise RecordError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    for key, parts in index.arrays.items():
        for part in parts:
            if checksum(arrays[part.sample_id, key]) != part.checksum:
                problem = f"{key} of sample {part.sample_id} is not what was written"
                raise RecordError(f"{path} is damaged: {problem}")
    return index, arrays


def _split(tensor: Array, sizes: list[int]) -> list[Array]:
    """Raises ValueError unless the sizes add up."""
    if sum(sizes) != tensor.size:
        raise ValueError(f"{tensor.size} elements, its index says {sum(sizes)}")
    ends = np.cumsum(sizes)
    return [tensor[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def _decode(raw: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise RecordError(f"{path} is damaged: {error}") from None

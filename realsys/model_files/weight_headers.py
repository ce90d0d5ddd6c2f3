"""Headers of the safetensors files of a Hugging Face directory, and the check of its weights by them, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from realsys.errors import ModelError
from realsys.model_files.architecture import HfModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_CHUNK = 1 << 24  # bytes
_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_DTYPES = ("F32", "BF16", "F16", "F64")
_NOT_READ = "rotary_emb.inv_freq"  # old checkpoints store it, and every reader computes it


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str  # name in safetensors: BF16, F32, ...
    shape: tuple[int, ...]
    start: int  # byte in the file
    size: int  # bytes


def check_weights(directory: Path, model: HfModel) -> None:
    """Check that the files are whole and hold the tensors that ``model`` describes.

    Raises ModelError naming the file, and the tensor if it is about one.
    """
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for path, expected in weight_files(directory).items():
        tensors = read_header(path)
        if missing := sorted(expected - tensors.keys()):
            raise ModelError(f"{path}: tensor {missing[0]} is missing, which {INDEX} says is in it: download it again")
        found.update({name: (path, tensor) for name, tensor in tensors.items()})
    wanted = model.tensor_shapes()
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"{directory}: tensor {name} is missing; config.json asks for one of shape {shape}")
        path, stored = found[name]
        if stored.shape != shape:
            raise ModelError(f"{path}: tensor {name} has shape {stored.shape}, config.json says {shape}")
    if model.tied and model.head == "lm" and _HEAD in found and not _equal(found[_HEAD], found[_EMBEDDING]):
        raise ModelError(
            f"{found[_HEAD][0]}: {_HEAD} differs from {_EMBEDDING}, but tie_word_embeddings in config.json says that "
            "they are one: transformers would load both; set it to false, or remove the tensor"
        )
    optional = {_HEAD} if model.tied or model.head == "value" else set()
    extra = [n for n in found.keys() - wanted.keys() - optional if not n.endswith(_NOT_READ)]
    if extra:
        raise ModelError(f"{directory}: tensor {min(extra)} is not part of the model that config.json describes")


def _equal(*stored: tuple[Path, StoredTensor]) -> bool:
    """Return True if two tensors have the same bytes."""
    (path, tensor), (other_path, other) = stored
    if (tensor.dtype, tensor.size) != (other.dtype, other.size):
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(tensor.start)
        other_file.seek(other.start)
        sizes = [min(_CHUNK, tensor.size - start) for start in range(0, tensor.size, _CHUNK)]
        return all(file.read(size) == other_file.read(size) for size in sizes)


def weight_files(directory: Path) -> dict[Path, set[str]]:
    """Return each file with the tensors that the index places in it; a single file has no index. Raises ModelError."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise ModelError(f"{directory}: neither {SINGLE} nor {INDEX} found: only these safetensors are read")
        return {directory / SINGLE: set()}
    shards: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            shards.setdefault(directory / file, set()).add(name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: cannot be read as an index with a weight_map: {error!r}") from None
    return shards


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Raises ModelError unless it has the bytes that its header announces."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
            if head == _LFS:
                raise ModelError(
                    f"{path}: is a git-lfs pointer, not the weights: run `git lfs pull` in the model's clone"
                )
            (length,) = struct.unpack("<Q", head[:8])
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            file.seek(8)
            header: dict[str, Any] = json.loads(file.read(length))
            size = file.seek(0, 2)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        announced = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path}: is not a safetensors file, or is truncated: download it again") from None
    if size != announced:
        raise ModelError(f"{path}: has {size:,} bytes, its header says {announced:,}: download it again")
    return tensors


def _stored(path: Path, name: str, entry: dict[str, Any], begin: int) -> StoredTensor:
    """Return a tensor of the header. ``begin``: byte after the header. Raises ModelError for an unknown dtype."""
    if entry["dtype"] not in _DTYPES:
        raise ModelError(f"{path}: tensor {name} is {entry['dtype']}; known: {', '.join(_DTYPES)}")
    first, end = entry["data_offsets"]
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), begin + first, end - first)

"""Checks the weights of a Hugging Face directory by the headers of its safetensors files, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from realsys.errors import ModelError
from realsys.hf.architecture import HfModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_DTYPES = ("F32", "BF16", "F16", "F64")
_NOT_READ = "rotary_emb.inv_freq"  # old checkpoints store it, and every reader computes it


def check_weights(directory: Path, model: HfModel) -> None:
    """Check that the files are whole and hold the tensors that ``model`` describes.

    Raises ModelError naming the file, and the tensor if it is about one.
    """
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path, expected in _shards(directory).items():
        shapes = _read_shapes(path)
        if missing := sorted(expected - shapes.keys()):
            raise ModelError(f"{path}: tensor {missing[0]} is missing, which {INDEX} says is in it: download it again")
        found.update({name: (path, shape) for name, shape in shapes.items()})
    wanted = model.tensor_shapes()
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"{directory}: tensor {name} is missing; config.json asks for one of shape {shape}")
        path, stored = found[name]
        if stored != shape:
            raise ModelError(f"{path}: tensor {name} has shape {stored}, config.json says {shape}")
    optional = {"lm_head.weight"} if model.tied or model.head == "value" else set()
    extra = [n for n in found.keys() - wanted.keys() - optional if not n.endswith(_NOT_READ)]
    if extra:
        raise ModelError(f"{directory}: tensor {min(extra)} is not part of the model that config.json describes")


def _shards(directory: Path) -> dict[Path, set[str]]:
    """Return each file with the tensors that the index places in it; a single file has no index."""
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


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape. Raises ModelError unless the file has exactly the bytes that its header announces."""
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
        shapes = {name: _checked_shape(path, name, entry) for name, entry in entries.items()}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path}: is not a safetensors file, or is truncated: download it again") from None
    if size != announced:
        raise ModelError(f"{path}: has {size:,} bytes, its header says {announced:,}: download it again")
    return shapes


def _checked_shape(path: Path, name: str, entry: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ModelError for a dtype that no reader knows."""
    if entry["dtype"] not in _DTYPES:
        raise ModelError(f"{path}: tensor {name} is {entry['dtype']}; known: {', '.join(_DTYPES)}")
    return tuple(entry["shape"])

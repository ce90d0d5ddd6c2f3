"""Turns a plain Hugging Face directory into a weight version, with links to its files. No torch.

Servers then load a model that no trainer of this trial wrote as they load any version: they verify every byte against
the checksums that were taken here. The directory itself is only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import WeightsError
from realsys.hf.weight_headers import StoredTensor, read_header, weight_files
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.records import Piece, ShardInfo, TensorInfo

_CHUNK = 1 << 20  # bytes read and hashed at a time


def step_of(model_dir: Path) -> int:
    """Return the train step of a model that realsys exported, 0 for any other one."""
    try:
        return manifests.load_manifest(model_dir).step
    except WeightsError:
        return 0


def adopt(model_dir: Path, root: Path, version: int, incarnation: str, *, check_alive: CheckAlive = unleased) -> Path:
    """Make the weights of ``model_dir`` the version ``version`` under ``root``, and its step; return its folder.

    Reads every byte once. Raises ModelError for a file that is not safetensors, WeightsError for one that cannot be
    read or linked.
    """
    tmp = manifests.prepare(root, version, incarnation)
    shards = [_linked(path.resolve(), tmp) for path in sorted(weight_files(model_dir))]
    return manifests.commit(
        tmp,
        version=version,
        incarnation=incarnation,
        step=version,
        shards=shards,
        model_dir=model_dir,
        check_alive=check_alive,
    )


def _linked(path: Path, tmp: Path) -> ShardInfo:
    """Link a file of weights into the folder of the version; return its record."""
    header = read_header(path)
    try:
        (tmp / path.name).symlink_to(path)
        size, checksum, tensors = _read(path, header)
    except OSError as error:
        raise WeightsError(f"{path} cannot be used as weights: {error.strerror}") from None
    infos = {
        name: TensorInfo(
            tensor.dtype,
            list(tensor.shape),
            tensors[name],
            [Piece(path.name, tensor.start, tensor.size, tensors[name])],
        )
        for name, tensor in header.items()
    }
    return ShardInfo(path.name, size, checksum, infos)


def _read(path: Path, header: dict[str, StoredTensor]) -> tuple[int, str, dict[str, str]]:
    """Return size and checksum of a file, and the checksums of its tensors by name."""
    whole, size = xxhash.xxh3_64(), 0
    checksums: dict[str, str] = {}
    with path.open("rb") as file:
        for name, tensor in sorted(header.items(), key=lambda entry: entry[1].start):
            for chunk in _chunks(file, tensor.start - size):  # the header, or a gap
                whole.update(chunk)
            own = xxhash.xxh3_64()
            for chunk in _chunks(file, tensor.size):
                whole.update(chunk)
                own.update(chunk)
            checksums[name], size = own.hexdigest(), tensor.start + tensor.size
    return size, whole.hexdigest(), checksums


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        chunk = file.read(min(_CHUNK, size))
        if not chunk:
            raise OSError(0, "it became shorter while it was read")
        size -= len(chunk)
        yield chunk

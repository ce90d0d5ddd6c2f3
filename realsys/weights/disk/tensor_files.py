"""Writes safetensors files tensor by tensor, without a copy of the file in memory. No torch.

A version of weights becomes a plain HF directory here as well, through the same reader that a server uses.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash

from realsys.cluster.failpoint import failpoint
from realsys.errors import WeightsError
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import ITEM_BYTES, fsync_directory
from realsys.weights.disk.reader import VersionReader
from realsys.weights.disk.records import FileInfo, Piece, ShardInfo, TensorInfo

_CHUNK = 1 << 20
#: bytes of tensors in one file of a materialised version, unless a single tensor is larger
_FILE_BYTES = 5 << 30


def write_safetensors(
    path: Path, layout: Mapping[str, tuple[str, list[int], int]], read: Callable[[str], Bytes]
) -> tuple[FileInfo, dict[str, int]]:
    """Write one fsynced file; returns it, and where in it each tensor begins.

    ``layout``: name -> (type as safetensors names it, shape, bytes). ``read`` is asked for the bytes of each in turn.
    The checksum is of the bytes handed to the file system, so that what a reader verifies is what the trainer had.
    Raises WeightsError naming path and cause (a full disk above all).
    """
    # Widest elements first: every tensor then begins where its type wants it, as safetensors' own writer has it.
    names = sorted(layout, key=lambda name: (-ITEM_BYTES[layout[name][0]], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape, size = layout[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_64()
    size = 0
    starts: dict[str, int] = {}
    try:
        failpoint("weights.write")
        with path.open("wb") as file:
            for data in (len(text).to_bytes(8, "little"), text):
                file.write(data)
                digest.update(data)
                size += len(data)
            for name in names:
                starts[name] = size
                view = read(name).data
                for at in range(0, len(view), _CHUNK):
                    digest.update(view[at : at + _CHUNK])
                    file.write(view[at : at + _CHUNK])
                size += len(view)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WeightsError(f"cannot write {path} ({8 + len(text) + end} bytes): {error.strerror}") from error
    return FileInfo(path.name, size, digest.hexdigest()), starts


def materialise(directory: Path, target: Path, expected_version: int | None = None) -> None:
    """Write the version in ``directory`` to ``target`` as a plain HF directory that refers to nothing else.

    Every tensor is verified on its way; one at a time is in memory. ``target`` is there whole or not at all; what it
    held before is replaced. It has a manifest and is a complete version itself. Raises WeightsError as ``stage`` does,
    also for another version than ``expected_version`` if that is given.
    """
    manifest = manifests.load_manifest(directory)
    manifests.check_version(manifest, directory, manifest.version if expected_version is None else expected_version)
    tmp = target.with_name(target.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        with VersionReader(directory, manifest) as reader:
            groups = list(_groups(reader.order(), manifest.tensors))
            shards = [
                _write_group(tmp / f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors", group, reader)
                for index, group in enumerate(groups)
            ]
        manifests.complete(
            tmp,
            version=manifest.version,
            incarnation=manifest.incarnation,
            step=manifest.step,
            shards=shards,
            model_dir=directory,
        )
        if target.exists():
            shutil.rmtree(target)
        tmp.rename(target)
    finally:
        # What an error leaves may lie in memory (/dev/shm), and is as large as the model.
        shutil.rmtree(tmp, ignore_errors=True)
    fsync_directory(target.parent)


def prove(directory: Path, expected_version: int) -> None:
    """Read the version as a server would, every byte. Raises WeightsError as ``stage`` does."""
    manifest = manifests.load_manifest(directory)
    manifests.check_version(manifest, directory, expected_version)
    with VersionReader(directory, manifest) as reader:
        for name in reader.order():
            reader.read(name)


def _groups(names: list[str], tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """The names cut into files."""
    group: list[str] = []
    size = 0
    for name in names:
        more = manifests.tensor_bytes(tensors[name])
        if group and size + more > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group


def _write_group(path: Path, names: list[str], reader: VersionReader) -> ShardInfo:
    infos = {name: reader.manifest.tensors[name] for name in names}
    layout = {name: (info.dtype, info.shape, manifests.tensor_bytes(info)) for name, info in infos.items()}
    file, starts = write_safetensors(path, layout, lambda name: reader.read(name).data)
    tensors = {
        name: TensorInfo(
            info.dtype, info.shape, info.checksum, [Piece(path.name, starts[name], layout[name][2], info.checksum)]
        )
        for name, info in infos.items()
    }
    return ShardInfo(file.file, file.size, file.checksum, tensors)

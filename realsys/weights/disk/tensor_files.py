"""Files of tensors: one rank's share of a version, or a version as a plain HF directory. No torch.

A version becomes a plain directory through the same reader that a server uses, one tensor in memory at
a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from realsys.cluster.failpoint import failpoint
from realsys.errors import WeightsError
from realsys.storage import files
from realsys.storage.commit_folder import TEMPORARY
from realsys.storage.files import FileInfo, TensorEntry
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import ITEM_BYTES
from realsys.weights.disk.reader import VersionReader
from realsys.weights.disk.records import Piece, ShardInfo, TensorInfo

#: bytes of tensors in one file of a materialised version, unless a single tensor is larger
_FILE_BYTES = 5 << 30


def write_safetensors(
    path: Path, layout: Mapping[str, tuple[str, list[int], int]], read: Callable[[str], Bytes]
) -> tuple[FileInfo, dict[str, int]]:
    """Write one fsynced file. Returns its info, and the byte at which each tensor begins.

    ``layout``: name -> (type as safetensors names it, shape, bytes). ``read`` returns the bytes of a
    tensor; it is called once for each, in the order of the file. Raises WeightsError, which names path
    and cause (such as a full disk).
    """
    # Widest elements first, as safetensors' own writer does: every tensor then begins at a multiple of
    # its element size, which readers that map the file rely on.
    names = sorted(layout, key=lambda name: (-ITEM_BYTES[layout[name][0]], name))
    entries = [TensorEntry(name, *layout[name]) for name in names]
    try:
        failpoint("weights.write")
        info, starts = files.write_safetensors(path, entries, (read(name).data for name in names))
    except OSError as error:
        size = sum(entry.size for entry in entries)
        raise WeightsError(f"cannot write {path} ({size} bytes of tensors): {error.strerror}") from error
    return info, dict(zip(names, starts, strict=True))


def materialise(directory: Path, target: Path, expected_version: int | None = None) -> None:
    """Write the version in ``directory`` to ``target``, as a plain HF directory that refers to nothing else.

    Every tensor is verified before it is written. ``target`` appears whole or not at all, in the place of
    an older one. It has a manifest, and is a complete version itself. Raises WeightsError as ``stage``
    does, also for another version than ``expected_version``, if that is given.
    """
    manifest = manifests.load_manifest(directory, expected_version)
    tmp = manifests.VERSION.prepare(target.with_name(target.name + TEMPORARY))
    try:
        with VersionReader(directory, manifest) as reader:
            groups = list(_groups(reader.order(), manifest.tensors))
            shards = [
                _write_group(tmp / f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors", group, reader)
                for index, group in enumerate(groups)
            ]
        manifests.commit(
            tmp,
            version=manifest.version,
            incarnation=manifest.incarnation,
            step=manifest.step,
            shards=shards,
            model_dir=directory,
            final=target,
            replace=True,
        )
    finally:
        # The rest after an error is as large as the model, and may occupy memory (/dev/shm).
        shutil.rmtree(tmp, ignore_errors=True)


def verify(directory: Path, expected_version: int) -> None:
    """Read the version as a server does, every byte. Raises WeightsError as ``stage`` does."""
    with VersionReader(directory, manifests.load_manifest(directory, expected_version)) as reader:
        for name in reader.order():
            reader.read(name)


def _groups(names: list[str], tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Divide the names into files."""
    group: list[str] = []
    size = 0
    for name in names:
        more = manifests.tensor_bytes(tensors[name])
        if group and size + more > _FILE_BYTES:
            yield group
            group = []
            size = 0
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
    return ShardInfo(path.name, file.size, file.checksum, tensors)

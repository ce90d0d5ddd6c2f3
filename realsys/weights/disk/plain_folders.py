"""Plain Hugging Face directories: a version becomes one, and one becomes a version. No torch.

A version becomes a plain directory through the same reader that a server uses, one tensor in memory at a time. One with
low-rank adapters may become a PEFT directory, which has the adapters alone.

A plain directory becomes a version with links to its files; the directory itself is only read. Servers then load a
model that no trainer of this trial wrote as they load any version: they verify every byte against the checksums that
were taken here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from realsys.cluster import files
from realsys.cluster.commit_folder import TEMPORARY
from realsys.cluster.failpoint import failpoint
from realsys.cluster.files import FileInfo, TensorEntry
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import WeightsError
from realsys.model_files.weight_headers import StoredTensor, read_header, weight_files
from realsys.weights.byte_ranges import RangeClient
from realsys.weights.disk import manifest as manifests
from realsys.weights.disk.delta import Bytes
from realsys.weights.disk.manifest import ITEM_BYTES, ShardInfo, StoredPiece, TensorInfo
from realsys.weights.disk.reader import HeldTensor, VersionReader

#: bytes of tensors in one file of a materialised version, unless a single tensor is larger
_FILE_BYTES = 5 << 30
_HASH_CHUNK = 1 << 20  # bytes read and hashed at a time


# ---- version to directory


def materialise(
    directory: Path, target: Path, expected_version: int | None = None, shards: RangeClient | None = None
) -> None:
    """Write the version in ``directory`` to ``target``, as a plain HF directory that refers to nothing else.

    Every tensor is verified before it is written. Raises WeightsError as ``stage`` does, also for another version than
    ``expected_version``, if that is given. ``shards``: as in VersionReader.
    """
    manifest = manifests.load_manifest(directory, expected_version)
    origin = Origin(manifest.version, manifest.incarnation, manifest.step, directory)
    with VersionReader(directory, manifest, shards=shards) as reader:
        write_plain(target, origin, {name: manifest.tensors[name] for name in reader.order()}, reader.read)


@dataclass(frozen=True, slots=True)
class Origin:
    """Identity of the weights in a plain HF directory. ``model_dir``: folder with their config and tokenizer files."""

    version: int
    incarnation: str
    step: int
    model_dir: Path


def write_plain(
    target: Path, origin: Origin, tensors: Mapping[str, TensorInfo], read: Callable[[str], HeldTensor]
) -> None:
    """Write ``tensors`` to ``target``, as a plain HF directory that refers to nothing else.

    Only their types and shapes are used. ``read`` returns a tensor; it is called once for each. ``target`` appears
    whole or not at all, in the place of an older one. It has a manifest, and is a complete version itself. Raises
    WeightsError.
    """
    tmp = manifests.VERSION.prepare(target.with_name(target.name + TEMPORARY))
    try:
        groups = list(_groups(tensors))
        shards = [
            _write_group(tmp / f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors", group, read)
            for index, group in enumerate(groups)
        ]
        manifests.commit(
            tmp,
            version=origin.version,
            incarnation=origin.incarnation,
            step=origin.step,
            shards=shards,
            model_dir=origin.model_dir,
            final=target,
            replace=True,
        )
    finally:
        # The rest after an error is as large as the model, and may occupy memory (/dev/shm).
        shutil.rmtree(tmp, ignore_errors=True)


def _groups(tensors: Mapping[str, TensorInfo]) -> Iterator[dict[str, TensorInfo]]:
    """Divide the tensors into files."""
    group: dict[str, TensorInfo] = {}
    size = 0
    for name, info in tensors.items():
        more = manifests.tensor_bytes(info)
        if group and size + more > _FILE_BYTES:
            yield group
            group = {}
            size = 0
        group[name] = info
        size += more
    yield group


def _write_group(path: Path, group: Mapping[str, TensorInfo], read: Callable[[str], HeldTensor]) -> ShardInfo:
    layout = {name: (info.dtype, info.shape, manifests.tensor_bytes(info)) for name, info in group.items()}
    checksums: dict[str, str] = {}

    def content(name: str) -> Bytes:
        held = read(name)
        checksums[name] = held.checksum
        return held.data

    file, starts = write_safetensors(path, layout, content)
    tensors = {
        name: TensorInfo(dtype, shape, checksums[name], [StoredPiece(path.name, starts[name], size, checksums[name])])
        for name, (dtype, shape, size) in layout.items()
    }
    return ShardInfo(path.name, file.size, file.checksum, tensors)


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


def verify(directory: Path, expected_version: int, shards: RangeClient | None = None) -> None:
    """Read the version as a server does, every byte. Raises WeightsError as ``stage`` does."""
    with VersionReader(directory, manifests.load_manifest(directory, expected_version), shards=shards) as reader:
        reader.read_all(VersionReader.read)


def write_adapters(
    directory: Path, target: Path, version: int, under: Mapping[str, str] | None, shards: RangeClient | None = None
) -> bool:
    """Write the adapters of the version in ``directory`` to ``target``, as a PEFT directory, verified.

    ``under``: checksums of the weights to which an engine will add them; None: they are not known, and taken for those
    of the version. Returns False, and writes nothing, if the version has no adapters. Raises WeightsError if it is
    damaged, or if its other weights are not those of ``under``.
    """
    manifest = manifests.load_manifest(directory, version)
    adapted = {name: info for name, info in manifest.tensors.items() if info.pieces[-1].rank}
    frozen = {name: info.checksum for name, info in manifest.tensors.items()}
    frozen |= {name: info.pieces[0].checksum for name, info in adapted.items()}
    if under is not None and (others := sorted(name for name in frozen if frozen[name] != under.get(name))):
        problem = f"tensor {others[0]} without its adapter is not that of the weights that the server has loaded"
        raise WeightsError(f"{directory}: {problem}; {len(others)} tensors differ")
    if not adapted:
        return False
    layout: dict[str, tuple[str, list[int], int]] = {}
    content: dict[str, Bytes] = {}
    with VersionReader(directory, manifest, shards=shards) as reader:
        for name, info in adapted.items():
            rank, (rows, columns) = info.pieces[-1].rank, info.shape
            factors, size = reader.factors(name), rank * columns * ITEM_BYTES[info.dtype]
            for part, shape, data in (("A", [rank, columns], factors[:size]), ("B", [rows, rank], factors[size:])):
                stored = f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
                layout[stored], content[stored] = (info.dtype, shape, data.size), data
    [(rank, scale)] = {(info.pieces[-1].rank, info.pieces[-1].scale) for info in adapted.values()}
    modules = sorted({name.split(".")[-2] for name in adapted})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, "target_modules": modules, "bias": "none"}
    target.mkdir(parents=True)
    write_safetensors(target / "adapter_model.safetensors", layout, content.__getitem__)
    (target / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    return True


# ---- directory to version


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


def step_of(model_dir: Path) -> int:
    """Return the train step of a model that realsys exported, 0 for any other one."""
    try:
        return manifests.load_manifest(model_dir).step
    except WeightsError:
        return 0


def _linked(path: Path, tmp: Path) -> ShardInfo:
    """Link a file of weights into the folder of the version; return its record."""
    header = read_header(path)
    try:
        (tmp / path.name).symlink_to(path)
        size, checksum, tensors = _checksums_of(path, header)
    except OSError as error:
        raise WeightsError(f"{path} cannot be used as weights: {error.strerror}") from None
    infos = {
        name: TensorInfo(
            tensor.dtype,
            list(tensor.shape),
            tensors[name],
            [StoredPiece(path.name, tensor.start, tensor.size, tensors[name])],
        )
        for name, tensor in header.items()
    }
    return ShardInfo(path.name, size, checksum, infos)


def _checksums_of(path: Path, header: dict[str, StoredTensor]) -> tuple[int, str, dict[str, str]]:
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
        chunk = file.read(min(_HASH_CHUNK, size))
        if not chunk:
            raise OSError(0, "it became shorter while it was read")
        size -= len(chunk)
        yield chunk

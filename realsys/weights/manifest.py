"""A weight version on disk: what makes it exist, how it is checked, when it goes. No torch.

    weights/{role}/v{N:08d}.{incarnation}.tmp/   while being written
    weights/{role}/v{N:08d}.{incarnation}/       after commit(): shards, index, config, tokenizer, MANIFEST.json

Order of commit: every shard is already fsynced by its writer -> index and auxiliary files -> MANIFEST.json -> fsync
of the folder -> rename -> fsync of the parent. A reader that finds a folder without ``.tmp`` finds it whole, and the
manifest's sizes and checksums prove it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from realsys.errors import WeightsError
from realsys.types import ShardInfo

MANIFEST = "MANIFEST.json"
INDEX = "model.safetensors.index.json"
#: files of an HF directory that are not weights and that a served version needs beside them
_AUXILIARY = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges)\.(json|txt|jinja)"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
)
_DIRECTORY = re.compile(r"v(\d{8})\.([A-Za-z0-9._-]+?)(\.tmp)?")
_CHUNK = 1 << 20


class Manifest(msgspec.Struct):
    """Contents of MANIFEST.json."""

    version: int
    incarnation: str
    step: int
    files: list[ShardInfo]


def directory_name(version: int, incarnation: str) -> str:
    return f"v{version:08d}.{incarnation}"


def prepare(root: Path, version: int, incarnation: str) -> Path:
    """Make the empty ``.tmp`` folder that the writers fill; a leftover of the same name is removed first."""
    tmp = root / (directory_name(version, incarnation) + ".tmp")
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    return tmp


def commit(
    tmp: Path, *, version: int, incarnation: str, step: int, shards: Sequence[ShardInfo], model_dir: Path
) -> Path:
    """Turn a filled ``.tmp`` folder into a version; returns its final folder.

    Raises WeightsError when a shard is missing, has another size than its writer reported, or two writers wrote one
    tensor; the folder then stays ``.tmp`` and is never served.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        path = tmp / shard.file
        size = path.stat().st_size if path.exists() else -1
        if size != shard.size:
            raise WeightsError(f"weights v{version}: {path} has {size} bytes, its writer reported {shard.size}")
        for name, nbytes in shard.tensors.items():
            if name in weight_map:
                raise WeightsError(f"weights v{version}: tensor {name} is in {weight_map[name]} and in {shard.file}")
            weight_map[name] = shard.file
            total += nbytes
    if not weight_map:
        raise WeightsError(f"weights v{version}: no rank wrote a tensor")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_durably(tmp / INDEX, msgspec.json.format(msgspec.json.encode(index)))
    for source in auxiliary_files(model_dir):
        write_durably(tmp / source.name, source.read_bytes())
    manifest = Manifest(version, incarnation, step, sorted(shards, key=lambda s: s.file))
    write_durably(tmp / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    fsync_directory(tmp)
    final = tmp.with_name(directory_name(version, incarnation))
    if final.exists():
        raise WeightsError(f"weights v{version}: {final} exists already; a version is written once")
    tmp.rename(final)
    fsync_directory(final.parent)
    return final


def auxiliary_files(model_dir: Path) -> list[Path]:
    """Config and tokenizer files of an HF directory."""
    return sorted(p for p in model_dir.iterdir() if p.is_file() and _AUXILIARY.fullmatch(p.name))


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest. Raises WeightsError when it is missing or no manifest of ours."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise WeightsError(f"{directory} has no {MANIFEST}: the version was never completed") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    for shard in manifest.files:
        if Path(shard.file).name != shard.file:
            raise WeightsError(f"{path} names a file outside its folder: {shard.file!r}")
    return manifest


def verify(directory: Path, expected_version: int) -> Manifest:
    """Check version, sizes and checksums of all files. Raises WeightsError naming the first that is wrong."""
    manifest = load_manifest(directory)
    check_version(manifest, directory, expected_version)
    for shard in manifest.files:
        check_file(directory / shard.file, shard, checksum_file(directory / shard.file))
    return manifest


def check_version(manifest: Manifest, directory: Path, expected_version: int) -> None:
    if manifest.version != expected_version:
        raise WeightsError(f"{directory} holds version {manifest.version}, version {expected_version} was asked for")


def check_file(path: Path, shard: ShardInfo, checksum: str) -> None:
    """Raise WeightsError unless size and checksum are those of the manifest."""
    size = path.stat().st_size
    if size != shard.size:
        raise WeightsError(f"{path} has {size} bytes, the manifest says {shard.size}: truncated or overwritten")
    if checksum != shard.checksum:
        raise WeightsError(f"{path} has checksum {checksum}, the manifest says {shard.checksum}: corrupt")


def checksum_file(path: Path) -> str:
    """xxh3-64 of the file, hex. Raises WeightsError when it is not there."""
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        raise WeightsError(f"{path} is in the manifest but not on disk") from None
    return digest.hexdigest()


def complete_versions(root: Path) -> list[tuple[int, str, Path]]:
    """(version, incarnation, folder) of everything committed under ``root``, oldest first."""
    found = []
    for path in root.iterdir() if root.exists() else ():
        match = _DIRECTORY.fullmatch(path.name)
        if match and not match[3] and (path / MANIFEST).exists():
            found.append((int(match[1]), match[2], path))
    return sorted(found)


def prune(root: Path, *, keep: int, in_use: Iterable[Path] = ()) -> list[Path]:
    """Delete all but the newest ``keep`` versions and those ``in_use``; returns what went.

    The manifest goes first, so that a reader who comes meanwhile sees an incomplete version, not a broken one.
    """
    protected = {path.resolve() for path in in_use}
    gone = []
    for _, _, path in complete_versions(root)[:-keep]:
        if path.resolve() in protected:
            continue
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
        gone.append(path)
    return gone


def export_copy(directory: Path, target: Path) -> None:
    """Copy a version to ``target`` as a plain HF directory, whole or not at all."""
    tmp = target.with_name(target.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.copytree(directory, tmp)
    if target.exists():
        shutil.rmtree(target)
    tmp.rename(target)
    fsync_directory(target.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync one file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

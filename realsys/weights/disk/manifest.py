"""A weight version on disk: what makes it exist, how it is checked, when it goes. No torch.

    weights/{role}/v{N:08d}.{incarnation}.tmp/   while being written
    weights/{role}/v{N:08d}.{incarnation}/       after commit(): shards, index, config, tokenizer, MANIFEST.json

Order of commit: every shard is already fsynced by its writer -> index and auxiliary files -> MANIFEST.json -> fsync
of the folder -> rename -> fsync of the parent. A reader that finds a folder without ``.tmp`` finds it whole, and the
manifest's checksums prove it.

The manifest lists every tensor with the pieces it is made of. Where all of them are whole and in the version's own
folder, that folder is a plain HF directory. Otherwise the version refers to earlier ones (``needs``): its own files
are then called ``*.part`` and have no index, so that nobody takes a part of the weights for all of them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from realsys.errors import MALFORMED, WeightsError
from realsys.weights.disk.records import FileInfo, Piece, ShardInfo, TensorInfo

MANIFEST = "MANIFEST.json"
INDEX = "model.safetensors.index.json"
#: bytes of an element, by the name safetensors gives its type
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
#: files of an HF directory that are not weights and that a served version needs beside them
_AUXILIARY = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges)\.(json|txt|jinja)"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
)
_DIRECTORY = re.compile(r"v(\d{8})\.([A-Za-z0-9._-]+?)(\.tmp)?")


class Needs(msgspec.Struct):
    """The part of MANIFEST.json that ``prune`` looks at: folders of earlier versions that this one refers to."""

    needs: list[str]


class Manifest(Needs):
    """Contents of MANIFEST.json."""

    version: int
    incarnation: str
    step: int
    files: list[FileInfo]
    tensors: dict[str, TensorInfo]


def tensor_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * ITEM_BYTES[info.dtype]


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
    tmp: Path,
    *,
    version: int,
    incarnation: str,
    step: int,
    shards: Sequence[ShardInfo],
    model_dir: Path,
    replace: bool = False,
) -> Path:
    """Turn a filled ``.tmp`` folder into a version; returns its final folder. ``replace``: in the place of the same
    version, which was damaged; a reader finds either the one, or none for a moment, or the other.

    Raises WeightsError when a shard is missing, has another size than its writer reported, two writers wrote one
    tensor, or an earlier version that it refers to is not there; the folder then stays ``.tmp`` and is never served.
    """
    final = tmp.with_name(directory_name(version, incarnation))
    if final.exists() and not replace:
        raise WeightsError(f"weights v{version}: {final} exists already; a version is written once")
    complete(tmp, version=version, incarnation=incarnation, step=step, shards=shards, model_dir=model_dir)
    aside = final.with_name(f"{final.name}.damaged.tmp")
    if final.exists():
        final.rename(aside)
    tmp.rename(final)
    fsync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)  # what stays of it goes when training starts again
    return final


def complete(
    folder: Path, *, version: int, incarnation: str, step: int, shards: Sequence[ShardInfo], model_dir: Path
) -> None:
    """Add everything to a folder of shards that a version consists of, the manifest last. Raises as ``commit``."""
    tensors = _merged(folder, version, shards)
    own = directory_name(version, incarnation)
    folders = {piece.folder for info in tensors.values() for piece in info.pieces}
    needs = sorted(folders - {own, ""})
    plain = not needs and all(len(info.pieces) == 1 for info in tensors.values())
    # A writer knows the files of earlier versions by the names that it gave them.
    names = {(need, Path(found.file).stem): found.file for need in needs for found in _files(folder.parent / need)}
    files = []
    for shard in sorted(shards, key=lambda shard: shard.file):
        file = shard.file if plain else f"{Path(shard.file).stem}.part"
        (folder / shard.file).rename(folder / file)
        files.append(FileInfo(file, shard.size, shard.checksum))
        names |= {(mine, Path(file).stem): file for mine in (own, "")}
    for info in tensors.values():
        info.pieces = [_placed(piece, own, names, version) for piece in info.pieces]
    if plain:
        weight_map = {name: info.pieces[0].file for name, info in sorted(tensors.items())}
        index = {"metadata": {"total_size": sum(map(tensor_bytes, tensors.values()))}, "weight_map": weight_map}
        write_durably(folder / INDEX, msgspec.json.format(msgspec.json.encode(index)))
    for source in auxiliary_files(model_dir):
        write_durably(folder / source.name, source.read_bytes())
    manifest = Manifest(needs, version, incarnation, step, files, tensors)
    write_durably(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    fsync_directory(folder)


def _files(directory: Path) -> list[FileInfo]:
    return load_manifest(directory).files


def _placed(piece: Piece, own: str, names: Mapping[tuple[str, str], str], version: int) -> Piece:
    file = names.get((piece.folder, Path(piece.file).stem))
    if file is None:
        raise WeightsError(f"weights v{version} refers to {piece.folder or own}/{piece.file}, which is not there")
    return msgspec.structs.replace(piece, file=file, folder="" if piece.folder == own else piece.folder)


def _merged(folder: Path, version: int, shards: Sequence[ShardInfo]) -> dict[str, TensorInfo]:
    """The tensors of all writers by name, their files checked."""
    tensors: dict[str, TensorInfo] = {}
    writer: dict[str, str] = {}
    for shard in shards:
        path = folder / shard.file
        size = path.stat().st_size if path.exists() else -1
        if size != shard.size:
            raise WeightsError(f"weights v{version}: {path} has {size} bytes, its writer reported {shard.size}")
        for name, info in shard.tensors.items():
            if name in tensors:
                raise WeightsError(f"weights v{version}: tensor {name} is in {writer[name]} and in {shard.file}")
            # A copy: the writer goes on with its own.
            tensors[name], writer[name] = msgspec.structs.replace(info), shard.file
    if not tensors:
        raise WeightsError(f"weights v{version}: no rank wrote a tensor")
    return tensors


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
    except (OSError, *MALFORMED) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    for need in manifest.needs:
        if not _DIRECTORY.fullmatch(need):
            raise WeightsError(f"{path} refers to {need[:80]!r}, which is no folder of a version")
    for file in manifest.files:
        _check_inside(path, file.file)
    for name, info in manifest.tensors.items():
        _check_tensor(path, name, info)
    return manifest


def _check_inside(path: Path, file: str) -> None:
    if Path(file).name != file:
        raise WeightsError(f"{path} names a file outside its folder: {file!r}")


def _check_tensor(path: Path, name: str, info: TensorInfo) -> None:
    if info.dtype not in ITEM_BYTES or min(info.shape, default=0) < 0:
        raise WeightsError(f"{path}: tensor {name} is of type {info.dtype!r} and shape {info.shape}: no such tensor")
    whole = [not piece.base for piece in info.pieces]
    if not whole or whole != [True] + [False] * (len(whole) - 1) or info.pieces[0].size != tensor_bytes(info):
        raise WeightsError(f"{path}: tensor {name} must begin with a piece of all its {tensor_bytes(info)} bytes")
    for piece in info.pieces:
        _check_inside(path, piece.file)
        if min(piece.start, piece.size) < 0 or (piece.folder and not _DIRECTORY.fullmatch(piece.folder)):
            raise WeightsError(f"{path}: a piece of tensor {name} is out of bounds: {piece}")


def check_version(manifest: Manifest, directory: Path, expected_version: int) -> None:
    if manifest.version != expected_version:
        raise WeightsError(f"{directory} holds version {manifest.version}, version {expected_version} was asked for")


def complete_versions(root: Path) -> list[tuple[int, str, Path]]:
    """(version, incarnation, folder) of everything committed under ``root``, in the order of its publication.

    An incarnation that went back to a checkpoint publishes lower versions than the one before it, but later.
    """
    found = []
    for path in root.iterdir() if root.exists() else ():
        match = _DIRECTORY.fullmatch(path.name)
        if match and not match[3] and (path / MANIFEST).exists():
            found.append((int(match[1]), match[2], path))
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


@dataclass(slots=True)
class Removed:
    """What a removal of versions came to. ``problems``: folders that stay, and why; none of them ends anything."""

    gone: list[Path] = field(default_factory=list)
    problems: dict[Path, str] = field(default_factory=dict)

    def remove(self, path: Path) -> None:
        """The manifest goes first: a reader who comes meanwhile sees an incomplete version, not a broken one."""
        try:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        except OSError as error:  # above all a network file system, on which a reader has a file of it open
            self.problems[path] = f"cannot be removed now: {error.strerror}; it is when training starts again"
        else:
            self.gone.append(path)


def discard_unfinished(root: Path) -> Removed:
    """Delete every folder that is no complete version. Only while nobody writes here."""
    removed = Removed()
    for path in sorted(root.iterdir()) if root.exists() else ():
        match = _DIRECTORY.fullmatch(path.name)
        if match and (match[3] or not (path / MANIFEST).exists()):
            removed.remove(path)
    return removed


def prune(root: Path, *, keep: int, in_use: Iterable[Path] = ()) -> Removed:
    """Delete all but the newest ``keep`` versions, those ``in_use`` and what these refer to.

    Of a version whose manifest is damaged nobody knows what it refers to: all before it stay for as long as it does.
    """
    removed = Removed()
    versions = [path for _, _, path in complete_versions(root)]
    used = {path.resolve() for path in in_use}
    kept = {path for path in versions if path in versions[-keep:] or path.resolve() in used}
    for number, path in enumerate(versions):
        if path in kept:
            try:
                kept |= {root / need for need in _needs(path)}
            except WeightsError as error:
                kept |= set(versions[:number])
                removed.problems[path] = f"{error}; what it may refer to stays as long as it does"
    for path in versions:
        if path not in kept:
            removed.remove(path)
    return removed


def check_reference(directory: Path) -> None:
    """Raises WeightsError if a later version must not refer to this one: it is damaged, or what it refers to is."""
    for folder in (directory, *(directory.parent / need for need in load_manifest(directory).needs)):
        for file in load_manifest(folder).files:
            path = folder / file.file
            try:
                size = path.stat().st_size
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
            if size != file.size:
                raise WeightsError(f"{path} has {size} bytes, {MANIFEST} says {file.size}")


def _needs(directory: Path) -> list[str]:
    path = directory / MANIFEST
    try:
        needs = msgspec.json.decode(path.read_bytes(), type=Needs).needs
    except (OSError, *MALFORMED) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    there = {folder.name for folder in directory.parent.iterdir()}
    if missing := [need for need in needs if need not in there]:
        raise WeightsError(f"{path} is damaged: {missing[0][:80]!r}, which it refers to, is not there")
    return needs


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync one file. Raises OSError with its path."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Format of a weight version on disk. No torch.

    weights/{role}/v{N:08d}.{incarnation}/   a folder as in realsys.cluster.commit_folder:
        shards, index, config, tokenizer, MANIFEST.json

The manifest lists every tensor with the pieces that it is made of. If all pieces are whole and in the
version's own folder, that folder is a plain HF directory. Otherwise the version refers to earlier ones
(``needs``): its own files are then called ``*.part`` and have no index, so that no loader takes a part
of the weights for all of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from realsys.cluster.commit_folder import TEMPORARY, FolderFormat, FolderManifest, Removed
from realsys.cluster.files import FileInfo, write_durably
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import WeightsError
from realsys.model_files.config_json import scoring_config

MANIFEST = "MANIFEST.json"
INDEX = "model.safetensors.index.json"
#: bytes of an element, by the name safetensors gives its type
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
#: safetensors' name -> the one in config.json
_HF_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: files of an HF directory that are not weights, and that a served version needs
_AUXILIARY = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges)\.(json|txt|jinja)"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
)


# ---- records


class VersionManifest(FolderManifest, frozen=True):
    """Contents of MANIFEST.json.

    needs  folders of earlier versions that this one refers to
    ranks  URL of the rank by the file that it has in its host's memory (``memory``)
    """

    needs: list[str]
    version: int
    incarnation: str
    step: int
    tensors: dict[str, TensorInfo]
    ranks: dict[str, str] = msgspec.field(default_factory=dict)


VERSION = FolderFormat(
    kind="weight version",
    manifest=MANIFEST,
    contents=VersionManifest,
    number=2,
    pattern=re.compile(r"v(\d{8})\.([A-Za-z0-9._-]+)"),
    error=WeightsError,
    advice="the trainer must write it again",
)


class TensorInfo(msgspec.Struct, omit_defaults=True):
    """A tensor of a weight version, as its writer reports it.

    The first piece is the whole tensor, and each further piece changes it.
    """

    dtype: str  # name in safetensors: BF16, F32, ...
    shape: list[int]
    checksum: str  # xxh3-64 of the tensor's bytes, hex
    pieces: list[StoredPiece]
    digest: str = ""  # checksum that any device can compute (``group``)


class StoredPiece(msgspec.Struct, omit_defaults=True):
    """Bytes of a file that make up a tensor: all of it, or its difference from the tensor with
    checksum ``base``.

    ``folder``: folder name of the version that wrote the bytes; empty: the version itself. ``rank``: the difference
    is ``scale`` times B A, and the bytes are those of A and B in the type of the tensor (``realsys.weights.low_rank``).
    """

    file: str
    start: int  # byte in the file
    size: int  # bytes
    checksum: str  # xxh3-64 of these bytes, hex
    base: str = ""
    folder: str = ""
    rank: int = 0
    scale: float = 1.0


class ShardInfo(msgspec.Struct):
    """One rank's file of a weight version, and the rank's share of the tensors, by HF name."""

    file: str
    size: int  # bytes
    checksum: str  # xxh3-64 of the whole file, hex
    tensors: dict[str, TensorInfo]
    rank: str = ""  # URL of the rank that has it in its host's memory, to which the file in the folder is a link


class DiskPlan(msgspec.Struct):
    """Instructions to every rank: write into the existing folder ``directory``.

    ``base``: folder name of the version before, which this one may refer to; empty: write
    everything.
    """

    directory: str
    base: str = ""


def tensor_bytes(info: TensorInfo) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(info.shape) * ITEM_BYTES[info.dtype]


def directory_name(version: int, incarnation: str) -> str:
    """Return the folder name of a version."""
    return f"v{version:08d}.{incarnation}"


# ---- writing


def prepare(root: Path, version: int, incarnation: str) -> Path:
    """Make the empty ``.tmp`` folder that the writers fill; a leftover of the same name is removed first."""
    return VERSION.prepare(root / (directory_name(version, incarnation) + TEMPORARY))


def commit(
    tmp: Path,
    *,
    version: int,
    incarnation: str,
    step: int,
    shards: Sequence[ShardInfo],
    model_dir: Path,
    final: Path | None = None,
    replace: bool = False,
    check_alive: CheckAlive = unleased,
) -> Path:
    """Turn a filled ``.tmp`` folder into a version, and return its final folder.

    ``final``: another place than the version's folder next to ``tmp``. ``replace``: in the place of the
    same version, which was damaged. Raises WeightsError if a shard is missing or has another size than
    its writer reported, if two writers wrote one tensor, or if an earlier version that it refers to is
    not there; the folder then stays ``.tmp`` and is never served (``fenced-weights``).
    """
    tensors = _merged(tmp, version, shards)
    own = directory_name(version, incarnation)
    needs = sorted({piece.folder for info in tensors.values() for piece in info.pieces} - {own, ""})
    plain = not needs and all(len(info.pieces) == 1 for info in tensors.values())
    # A writer knows the files of earlier versions by the names that it gave them, without ".part".
    names = {(need, Path(file).stem): file for need in needs for file in load_manifest(tmp.parent / need).files}
    files: dict[str, FileInfo] = {}
    ranks: dict[str, str] = {}
    for shard in sorted(shards, key=lambda shard: shard.file):
        file = shard.file if plain else f"{Path(shard.file).stem}.part"
        (tmp / shard.file).rename(tmp / file)
        files[file] = FileInfo(shard.size, shard.checksum)
        ranks |= {file: shard.rank} if shard.rank else {}
        names |= {(folder, Path(file).stem): file for folder in (own, "")}
    for info in tensors.values():
        info.pieces = [_placed(piece, own, names, version) for piece in info.pieces]
    if plain:
        weight_map = {name: info.pieces[0].file for name, info in sorted(tensors.items())}
        index = {"metadata": {"total_size": sum(map(tensor_bytes, tensors.values()))}, "weight_map": weight_map}
        write_durably(tmp / INDEX, msgspec.json.format(msgspec.json.encode(index)))
    dtypes = Counter[str]()
    for info in tensors.values():
        dtypes[info.dtype] += tensor_bytes(info)
    scored = "score.weight" in tensors
    for name, content in auxiliary_files(model_dir, dtypes.most_common(1)[0][0], scored=scored).items():
        write_durably(tmp / name, content)
    manifest = VersionManifest(needs, version, incarnation, step, tensors, ranks, files=files)
    return VERSION.commit(tmp, final or tmp.with_name(own), manifest, check_alive, replace=replace)


def _placed(piece: StoredPiece, own: str, names: Mapping[tuple[str, str], str], version: int) -> StoredPiece:
    file = names.get((piece.folder, Path(piece.file).stem))
    if file is None:
        raise WeightsError(f"weights v{version} refers to {piece.folder or own}/{piece.file}, which is not there")
    return msgspec.structs.replace(piece, file=file, folder="" if piece.folder == own else piece.folder)


def _merged(folder: Path, version: int, shards: Sequence[ShardInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of all writers by name. Raises WeightsError for a bad file or a doubled tensor."""
    tensors: dict[str, TensorInfo] = {}
    file_of: dict[str, str] = {}
    for shard in shards:
        if not _elsewhere(folder / shard.file, shard.rank):
            VERSION.check_size(folder / shard.file, FileInfo(shard.size, shard.checksum))
        for name, info in shard.tensors.items():
            if name in tensors:
                raise WeightsError(f"weights v{version}: tensor {name} is in {file_of[name]} and in {shard.file}")
            tensors[name] = msgspec.structs.replace(info)  # a copy: the writer changes its own later
            file_of[name] = shard.file
    if not tensors:
        raise WeightsError(f"weights v{version}: no rank wrote a tensor")
    return tensors


def _elsewhere(path: Path, rank: str) -> bool:
    """Return True if a file is in the memory of another host, where ``rank`` has it."""
    return bool(rank) and not path.exists()


def auxiliary_files(model_dir: Path, dtype: str, *, scored: bool = False) -> dict[str, bytes]:
    """Return the config and tokenizer files of an HF directory by name, for weights of another type.

    ``dtype``: safetensors' name of the type of most weights. config.json names it: libraries allocate the
    model in this type, so a wrong float32 would double the memory of bfloat16. ``scored``: the weights are those of a
    reward model, also if the directory is a language model, with which its training began.
    """
    paths = sorted(path for path in model_dir.iterdir() if path.is_file() and _AUXILIARY.fullmatch(path.name))
    files = {path.name: path.read_bytes() for path in paths}
    if "config.json" in files and (scored or dtype in _HF_DTYPES):
        config = msgspec.json.decode(files["config.json"])
        if dtype in _HF_DTYPES:
            config["dtype" if "dtype" in config else "torch_dtype"] = _HF_DTYPES[dtype]
        config = scoring_config(config) if scored else config
        files["config.json"] = msgspec.json.format(msgspec.json.encode(config), indent=2)
    return files


# ---- reading


def load_manifest(directory: Path, expected_version: int | None = None) -> VersionManifest:
    """Read and check the manifest of a version. Raises WeightsError, also for another version."""
    manifest = VERSION.read(directory)
    path = directory / MANIFEST
    if expected_version not in (None, manifest.version):
        problem = f"holds version {manifest.version}, version {expected_version} was requested"
        raise WeightsError(f"{directory} {problem}")
    for need in manifest.needs:
        if not VERSION.pattern.fullmatch(need):
            raise WeightsError(f"{path} refers to {need[:80]!r}, which is not the folder of a version")
    for name, info in manifest.tensors.items():
        _check_tensor(path, name, info)
    return manifest


def _check_tensor(path: Path, name: str, info: TensorInfo) -> None:
    if info.dtype not in ITEM_BYTES or min(info.shape, default=0) < 0:
        raise WeightsError(f"{path}: tensor {name} is of type {info.dtype!r} and shape {info.shape}: no such tensor")
    whole = [not piece.base for piece in info.pieces]
    if not whole or whole != [True] + [False] * (len(whole) - 1) or info.pieces[0].size != tensor_bytes(info):
        raise WeightsError(f"{path}: tensor {name} must begin with a piece of all its {tensor_bytes(info)} bytes")
    for piece in info.pieces:
        VERSION.check_name(path, piece.file)
        if min(piece.start, piece.size) < 0 or (piece.folder and not VERSION.pattern.fullmatch(piece.folder)):
            raise WeightsError(f"{path}: a piece of tensor {name} is out of bounds: {piece}")
        if piece.rank and (
            len(info.shape) != 2
            or info.dtype not in _HF_DTYPES
            or piece.rank < 0
            or piece.size != piece.rank * sum(info.shape) * ITEM_BYTES[info.dtype]
            or not math.isfinite(piece.scale)
        ):
            raise WeightsError(f"{path}: a piece of tensor {name} is not an adapter of its shape {info.shape}: {piece}")


# ---- versions of a role


def complete_versions(root: Path) -> list[tuple[int, str, Path]]:
    """Return (version, incarnation, folder) of every version under ``root``, in the order of publication.

    That order is ``monotonic``: (incarnation, version). A trainer that went back to a checkpoint publishes
    lower version numbers than the one before it, but as a later incarnation.
    """
    named = [(folder.name[1:].partition("."), folder) for folder in VERSION.complete(root)]
    versions = [(int(number), incarnation, folder) for (number, _, incarnation), folder in named]
    return sorted(versions, key=lambda version: (version[1], version[0]))


def prune(root: Path, *, keep: int, in_use: Iterable[Path] = ()) -> Removed:
    """Delete the ``superfluous`` versions."""
    versions, problems = superfluous(root, keep=keep, in_use=in_use)
    return Removed(problems=problems) + VERSION.remove(versions)


def superfluous(root: Path, *, keep: int, in_use: Iterable[Path] = ()) -> tuple[list[Path], dict[str, str]]:
    """Return all versions but the newest ``keep``, those ``in_use`` and those to which these refer; and problems.

    If the manifest of a kept version is damaged, its references are unknown: all versions before it
    stay as long as it does.
    """
    versions = [path for _, _, path in complete_versions(root)]
    used = {path.resolve() for path in in_use}
    kept = {path for path in versions if path in versions[-keep:] or path.resolve() in used}
    problems: dict[str, str] = {}
    for number, path in enumerate(versions):
        if path in kept:
            try:
                kept |= _references(path)
            except WeightsError as error:
                kept |= set(versions[:number])
                problems[str(path)] = f"{error}; the versions before it stay as long as it does"
    return [path for path in versions if path not in kept], problems


def check_reference(directory: Path) -> None:
    """Raise WeightsError if a later version must not refer to this one: it is damaged, or its references are."""
    for folder in (directory, *_references(directory)):
        manifest = load_manifest(folder)
        for name, info in manifest.files.items():
            if not _elsewhere(folder / name, manifest.ranks.get(name, "")):
                VERSION.check_size(folder / name, info)


def _references(directory: Path) -> set[Path]:
    references = {directory.parent / need for need in load_manifest(directory).needs}
    if missing := sorted(str(folder) for folder in references if not folder.exists()):
        raise WeightsError(f"{directory / MANIFEST} refers to {missing[0]}, which is not there")
    return references

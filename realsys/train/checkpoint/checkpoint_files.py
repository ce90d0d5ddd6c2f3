"""A checkpoint on disk: what makes it complete, how it is found and checked. No torch.

    {trial}/checkpoints/step-00000010.tmp/       while being written
    {trial}/checkpoints/step-00000010.damaged/   set aside by recovery, which took the one before
    {trial}/checkpoints/step-00000010/           after commit (realsys.master.checkpoints)
        actor-00001-of-00004.safetensors         the tensors of one rank of the role's mesh
        actor-00001-of-00004.json                what they are: RankIndex, written once they are on disk
        state.json                               CheckpointState, written last

Order of commit: every rank has synced its two files -> their sizes are compared with what the writers say -> state.json
-> fsync of the folder -> rename -> fsync of the parent. A folder without ``.tmp`` is whole, and the checksums prove it.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from realsys.config.allocation import ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.errors import MALFORMED, CheckpointError
from realsys.manager.messages import DataPosition

FORMAT = 1  # of the whole folder; another one is refused
STATE = "state.json"
_READERS, _CHUNK = 4, 1 << 22  # threads that verify, and bytes read at a time
_DIRECTORY = re.compile(r"step-(\d{8})")

T = TypeVar("T")


class FileInfo(msgspec.Struct, frozen=True):
    """``size`` in bytes, ``checksum`` xxh3-64 of the whole file in hex."""

    size: int
    checksum: str


class RoleState(msgspec.Struct, frozen=True):
    """What a role must have in common with the one that continues it. ``layout`` may differ; it is for people."""

    sizes: dict[str, int]  # of the model
    optimizer: str
    layout: str


class CheckpointState(msgspec.Struct, frozen=True):
    """Everything of a checkpoint that is not a tensor. ``files``: every other file of the folder."""

    step: int
    version: int
    seed: int
    batch_groups: int
    position: DataPosition
    roles: dict[str, RoleState]
    kl: dict[str, float]  # state of the adaptive KL controller; empty without one
    config_digest: str
    time: float  # unix seconds
    files: dict[str, FileInfo] = {}
    format: int = FORMAT


class _Envelope(msgspec.Struct):
    """state.json: the state as it was encoded, and the checksum of those bytes."""

    checksum: str
    state: msgspec.Raw


class Piece(msgspec.Struct, frozen=True):
    """A tensor of a rank's file: ``[start, stop)`` of the flattened box at ``offset`` with ``shape`` of a whole tensor.

    ``kind`` is "param" (fp32 master where there is one) or the name of an optimizer state; ``name`` the parameter's,
    with layers counted over the whole model; ``whole`` its shape without parallelism.
    """

    kind: str
    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str  # torch's name without "torch."
    position: int  # bytes from the begin of the file
    size: int  # bytes
    checksum: str


class RankIndex(msgspec.Struct, frozen=True):
    """What one rank wrote. ``phase``: name of the optimizer phase, None before the first step."""

    role: str
    step: int
    layout: ParallelLayout
    rank: int  # on the role's mesh
    sizes: dict[str, int]  # of the model as Megatron built it
    phase: str | None
    state: dict[str, float | list[float]]  # of the role beside model and optimizer
    file: FileInfo
    pieces: list[Piece]


# ---- names


def directory_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_stem(role: str, rank: int, ranks: int) -> str:
    """Name without suffix of the files of a rank."""
    return f"{role}-{rank + 1:05d}-of-{ranks:05d}"


def data_file(stem: str) -> str:
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    return f"{stem}.json"


def failure_file(stem: str) -> str:
    """Left by a rank whose write failed, as far as the disk lets it: whoever waits for its index need not."""
    return f"{stem}.failed"


# ---- find and read


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint under ``root``, oldest first."""
    found = []
    for path in root.iterdir() if root.exists() else ():
        match = _DIRECTORY.fullmatch(path.name)
        if match and (path / STATE).exists():
            found.append((int(match[1]), path))
    return sorted(found)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest complete one of the trial folder ``path``.

    Raises CheckpointError.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory; name a checkpoint or a trial folder")
    if (path / STATE).exists() or path.name.startswith("step-"):
        return path
    root = TrialPaths(path).checkpoints
    complete = complete_checkpoints(root)
    if not complete:
        problem = f"has no complete checkpoint in {root.name}/" if root.is_dir() else "is no checkpoint and no trial"
        raise CheckpointError(f"{path} {problem}; set checkpoint.every_steps or checkpoint.at_end to have some written")
    return complete[-1][1]


def encode_state(state: CheckpointState) -> bytes:
    """Content of state.json."""
    body = msgspec.json.format(msgspec.json.encode(state))
    return msgspec.json.encode(_Envelope(xxhash.xxh3_64_hexdigest(body), msgspec.Raw(body)))


def read_state(directory: Path) -> CheckpointState:
    """Raises CheckpointError when the checkpoint was never completed, or state.json is not what was written."""
    path = directory / STATE
    if directory.suffix == ".tmp" or not path.exists():
        raise CheckpointError(f"{directory} was never completed: use an older checkpoint")
    raw = read(path)
    envelope = decode(raw, _Envelope, path)
    if xxhash.xxh3_64_hexdigest(envelope.state) != envelope.checksum:
        raise CheckpointError(f"{path} is corrupt: its checksum is not that of its content; use an older checkpoint")
    probe = decode(bytes(envelope.state), dict[str, msgspec.Raw], path)
    if (found := bytes(probe.get("format", b"none"))) != str(FORMAT).encode():
        raise CheckpointError(f"{path} has format {found.decode()}, this realsys reads {FORMAT}")
    return decode(bytes(envelope.state), CheckpointState, path)


def check_sizes(directory: Path, state: CheckpointState) -> None:
    """Every file is there with its size. Raises CheckpointError naming the first that is not."""
    for name, info in state.files.items():
        check_size(directory / name, info)


def verify(directory: Path) -> CheckpointState:
    """Its state, once every byte of every file is proved to be what was written. Reads all of it.

    Raises CheckpointError naming the first file that is not.
    """
    state = read_state(directory)
    check_sizes(directory, state)

    def check(name: str) -> None:
        if (found := _checksum(directory / name)) != state.files[name].checksum:
            problem = f"has checksum {found}, {STATE} says {state.files[name].checksum}: corrupt"
            raise CheckpointError(f"{directory / name} {problem}; use an older checkpoint")

    with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as pool:
        for _ in pool.map(check, sorted(state.files)):
            pass
    return state


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from None
    return digest.hexdigest()


def check_size(path: Path, info: FileInfo) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from None
    if size != info.size:
        raise CheckpointError(f"{path} has {size} bytes, its writer says {info.size}: truncated or overwritten")


def read_index(directory: Path, state: CheckpointState, stem: str) -> RankIndex:
    """Raises CheckpointError unless the file is what the state says."""
    path = directory / index_file(stem)
    raw = read(path)
    if index_file(stem) not in state.files or xxhash.xxh3_64_hexdigest(raw) != state.files[path.name].checksum:
        raise CheckpointError(f"{path} is corrupt: its checksum is not that in {STATE}; use an older checkpoint")
    return decode(raw, RankIndex, path)


def role_stems(state: CheckpointState, role: str) -> list[str]:
    """The ranks' file names of a role, in rank order; empty when the checkpoint has no such role."""
    pattern = re.compile(re.escape(role) + r"-\d{5}-of-\d{5}\.json")
    return sorted(name.removesuffix(".json") for name in state.files if pattern.fullmatch(name))


def read(path: Path) -> bytes:
    """Raises CheckpointError when the file is not there."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; use an older checkpoint") from None


def decode(raw: bytes, kind: type[T], path: Path) -> T:
    """``raw`` as read from ``path``. Raises CheckpointError when it is something else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise CheckpointError(f"{path} is corrupt: {error}; use an older checkpoint") from None

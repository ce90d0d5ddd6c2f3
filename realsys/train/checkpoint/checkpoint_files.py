"""Format of a checkpoint on disk. No torch.

    {trial}/checkpoints/step-00000010/           a folder as in realsys.cluster.commit_folder
        actor-00001-of-00004.safetensors         tensors of one rank of the role's mesh
        actor-00001-of-00004.json                RankIndex: where each tensor is in that file
        state.json                               CheckpointState, the manifest

While it is written, the folder is ``step-00000010.{trainer_incarnation}.tmp``. A checkpoint that
recovery found to be damaged is ``step-00000010.damaged`` until the next checkpoint begins. Every rank
syncs its two files, the index last: an index says that the rank is done.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from realsys.cluster.commit_folder import FolderFormat, FolderManifest, checksum_of
from realsys.cluster.files import FileInfo
from realsys.config.allocation import ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.errors import CheckpointError
from realsys.manager.messages import DataPosition

STATE = "state.json"


class RoleState(msgspec.Struct, frozen=True):
    """Facts about a role that must be equal in the trial that continues it.

    ``sizes``: sizes of the model. ``layout`` may differ; it is there for people.
    """

    sizes: dict[str, int]
    optimizer: str
    layout: str


class CheckpointState(FolderManifest, frozen=True):
    """Everything of a checkpoint except the tensors.

    ``kl``: state of the adaptive KL controller, empty without one. ``time``: unix seconds.
    """

    step: int
    version: int
    seed: int
    batch_groups: int
    position: DataPosition
    roles: dict[str, RoleState]
    kl: dict[str, float]
    config_digest: str
    time: float


class CheckpointPiece(msgspec.Struct, frozen=True):
    """A tensor of a rank's file: ``[start, stop)`` of a flattened box of a whole tensor.

    The box is at ``offset`` of the whole tensor and has shape ``shape``.

    kind      "param" (the fp32 master copy, if the optimizer has one), or an optimizer state
    name      name of the parameter, with layers counted over the whole model
    whole     shape of the parameter without parallelism
    dtype     torch's name without "torch."
    position  byte in the file
    size      bytes
    checksum  xxh3-64 of these bytes, hex
    """

    kind: str
    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str
    position: int
    size: int
    checksum: str


class RankIndex(msgspec.Struct, frozen=True):
    """Contents of one rank's share of a role.

    rank   rank on the role's mesh
    sizes  sizes of the model, as Megatron built it
    phase  name of the optimizer phase; None before the first step
    state  state of the role that is neither in the model nor in the optimizer
    """

    role: str
    step: int
    layout: ParallelLayout
    rank: int
    sizes: dict[str, int]
    phase: str | None
    state: dict[str, float | list[float]]
    file: FileInfo
    pieces: list[CheckpointPiece]


CHECKPOINT = FolderFormat(
    kind="checkpoint",
    manifest=STATE,
    contents=CheckpointState,
    number=2,
    pattern=re.compile(r"step-(\d{8})"),
    error=CheckpointError,
    advice="use an older checkpoint",
    failpoint="checkpoint.commit",
)

read_state = CHECKPOINT.read
check_sizes = CHECKPOINT.check_sizes
verify = CHECKPOINT.verify


# ---- names


def directory_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def rank_stem(role: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's files, without suffix."""
    return f"{role}-{rank + 1:05d}-of-{ranks:05d}"


def data_file(stem: str) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"{stem}.safetensors"


def index_file(stem: str) -> str:
    """Return the name of the file with a rank's index."""
    return f"{stem}.json"


def failure_file(stem: str) -> str:
    """Return the name of the file that a rank leaves when its write failed, so that the master does not wait."""
    return f"{stem}.failed"


def role_stems(state: CheckpointState, role: str) -> list[str]:
    """Return the names of a role's files, in rank order; empty if the checkpoint has no such role."""
    pattern = re.compile(re.escape(role) + r"-\d{5}-of-\d{5}\.json")
    return sorted(name.removesuffix(".json") for name in state.files if pattern.fullmatch(name))


# ---- find and read


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete checkpoint under ``root``, oldest first."""
    return [(int(path.name.removeprefix("step-")), path) for path in CHECKPOINT.complete(root)]


def checkpoint_incarnation(directory: Path) -> str:
    """Return the incarnation of weights that are exported from a checkpoint: another one if the step is saved again."""
    return f"checkpoint-{checksum_of(CHECKPOINT.read_bytes(directory / STATE))}"


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest complete one of the trial folder ``path``.

    Raises CheckpointError.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: name a checkpoint or a trial folder")
    if (path / STATE).exists() or path.name.startswith("step-"):
        return path
    root = TrialPaths(path).checkpoints
    complete = complete_checkpoints(root)
    if not complete:
        problem = f"has no complete checkpoint in {root.name}/" if root.is_dir() else "is no checkpoint and no trial"
        raise CheckpointError(f"{path} {problem}: set checkpoint.every_steps or checkpoint.at_end to have some written")
    return complete[-1][1]


def decode_index(data: bytes, path: Path) -> RankIndex:
    """Decode the content of an index file. Raises CheckpointError."""
    return CHECKPOINT.decode(data, RankIndex, path)


def read_index(directory: Path, state: CheckpointState, stem: str) -> RankIndex:
    """Read an index. Raises CheckpointError unless the file is the one that the state lists."""
    path = directory / index_file(stem)
    data = CHECKPOINT.read_bytes(path)
    CHECKPOINT.check_bytes(path, data, state.files.get(path.name))
    return decode_index(data, path)

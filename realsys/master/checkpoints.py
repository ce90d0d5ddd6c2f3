"""Checkpoints of a trial: when one is taken, what makes it complete, which are kept. No torch.

    first      ──> a warmed-up or resumed state, so that recovery does not have to make it again
    after_step ──> .tmp folder ──> save_checkpoint to every trained role ──> the next step trains
                                      each rank: copy to host memory, then files, beside training
    after_step ──> all indexes there? ──> finish_checkpoint ──> sizes, state.json, fsync, rename ──> prune

Consumes the end of a step; waits for the copies, and for files only when the next checkpoint is due or the run ends;
produces `{trial}/checkpoints/step-00000010/`. At most one is being written. When one cannot be written the run ends
with CheckpointError; what was complete stays. Layout of the folder: ``realsys.train.checkpoint.checkpoint_files``.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import xxhash

from realsys.cluster.disk import on_disk
from realsys.cluster.failpoint import failpoint
from realsys.cluster.fence import CheckAlive, unleased
from realsys.cluster.topology import Mesh
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.errors import CheckpointError, RealsysError
from realsys.hf.config import read_sizes
from realsys.manager.messages import DataPosition
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CheckpointState, FileInfo, RankIndex, RoleState
from realsys.train.checkpoint.messages import FinishCheckpointRequest, LoadCheckpointRequest, SaveCheckpointRequest
from realsys.types import Empty
from realsys.weights.disk.manifest import fsync_directory, write_durably

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class CheckpointCalls(Protocol):
    """What is used of ``ModelWorkers``: each call goes to the whole mesh of its role."""

    def save_checkpoint(self, payload: SaveCheckpointRequest) -> Awaitable[list[Empty]]: ...
    def finish_checkpoint(self, payload: FinishCheckpointRequest) -> Awaitable[list[Empty]]: ...
    def load_checkpoint(self, payload: LoadCheckpointRequest) -> Awaitable[list[Empty]]: ...


@dataclass(frozen=True, slots=True)
class _Running:
    """A checkpoint whose files are being written. ``state`` lacks only the files."""

    directory: Path
    state: CheckpointState


class Checkpoints:
    """Takes and keeps the checkpoints of one trial; loads the one that it goes on from, its own or another trial's.

    ``meshes``: those of the trained roles. ``position``: where the manager is in the data. ``kl``: state of the KL
    controller. ``incarnation``: of the training side, whose lease ``check_alive`` looks at.
    """

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        *,
        meshes: Mapping[str, Mesh],
        workers: CheckpointCalls,
        position: Callable[[], Awaitable[DataPosition]],
        kl: Callable[[], dict[str, float]],
        incarnation: str = "",
        check_alive: CheckAlive = unleased,
    ) -> None:
        self._config, self._paths, self._meshes, self._workers = config, paths, dict(meshes), workers
        self._incarnation, self._check_alive = incarnation, check_alive
        self._position, self._kl = position, kl
        self._running: _Running | None = None
        self._newest_step = self._saved_step = 0

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint of this trial."""
        complete = files.complete_checkpoints(self._paths.checkpoints)
        return complete[-1][1] if complete else None

    async def after_step(self, step: int) -> None:
        """``step`` is trained, published and told to the manager. Raises CheckpointError."""
        self._newest_step = step
        await self._complete(wait=False)
        every = self._config.checkpoint.every_steps
        if every and step % every == 0:
            await self._begin(step)

    async def first(self, step: int) -> None:
        """``step`` is what training starts from, and no checkpoint of this trial has it. Returns when it is on disk:
        until then a failure would cost the warm-up. Raises CheckpointError.
        """
        settings = self._config.checkpoint
        if settings.every_steps or settings.on_stop:
            await self._begin(step)
            await self._complete(wait=True)

    async def finish(self, *, stopped: bool) -> None:
        """No further step comes; returns when everything is on disk. Raises CheckpointError."""
        settings = self._config.checkpoint
        if (settings.on_stop if stopped else settings.at_end) and self._newest_step > self._saved_step:
            await self._begin(self._newest_step)
        await self._complete(wait=True)

    async def load(self, directory: Path) -> CheckpointState:
        """Every trained role gets its state of the checkpoint. Raises RealsysError naming what does not fit."""
        state = await self._on_disk(directory, lambda: files.read_state(directory))
        requests = [LoadCheckpointRequest(role, str(directory)) for role in self._meshes]
        await asyncio.gather(*(self._workers.load_checkpoint(request) for request in requests))
        self._newest_step = self._saved_step = state.step
        return state

    async def _begin(self, step: int) -> None:
        """Returns when every rank has its copy, so that the next step may change what was copied."""
        await self._complete(wait=True)
        self._saved_step = step
        try:
            root = self._paths.checkpoints
            self._check_alive()  # a successor may be writing
            directory = await self._on_disk(root, lambda: prepare(root, step, self._incarnation))
            state = self._state(step, await self._position())
            requests = [SaveCheckpointRequest(role, step, str(directory)) for role in self._meshes]
            await asyncio.gather(*(self._workers.save_checkpoint(request) for request in requests))
        except RealsysError as error:
            raise self._failed(step, error) from error
        self._running = _Running(directory, state)

    async def _complete(self, *, wait: bool) -> None:
        """Complete the checkpoint that is being written; without ``wait`` only if no rank has to be waited for."""
        running = self._running
        if running is None:
            return
        tmp = running.directory
        if not (wait or await self._on_disk(tmp, lambda: self._is_written(tmp))):
            return
        self._running = None
        step, start = running.state.step, time.perf_counter()
        try:
            requests = [FinishCheckpointRequest(role, step) for role in self._meshes]
            await asyncio.gather(*(self._workers.finish_checkpoint(request) for request in requests))
            state, stems = running.state, self._stems()
            final = await self._on_disk(tmp, lambda: commit(tmp, state, stems, self._check_alive))
            root, keep = self._paths.checkpoints, self._config.checkpoint.keep
            gone = await self._on_disk(root, lambda: prune(root, keep))
        except RealsysError as error:
            raise self._failed(step, error) from error
        took = time.perf_counter() - start
        log.info("checkpoint %s is complete, waited %.3f s for it, pruned %d", final, took, len(gone))

    async def _on_disk(self, path: Path, work: Callable[[], Result]) -> Result:
        return await on_disk(f"checkpoint in {path}", self._config.cluster.request_timeout_s, work)

    def _is_written(self, directory: Path) -> bool:
        """Whether no rank is writing any more. One that has failed will say why when it is asked to finish."""
        found = {path.name for path in directory.iterdir()}
        stems = self._stems()
        failed = any(files.failure_file(stem) in found for stem in stems)
        return failed or all(files.index_file(stem) in found for stem in stems)

    def _stems(self) -> list[str]:
        return [
            files.rank_stem(role, rank, mesh.layout.world_size)
            for role, mesh in self._meshes.items()
            for rank in range(mesh.layout.world_size)
        ]

    def _state(self, step: int, position: DataPosition) -> CheckpointState:
        config = self._config
        return CheckpointState(
            step=step,
            version=step,
            seed=config.seed,
            batch_groups=config.train.batch_groups,
            position=position,
            roles={role: describe_role(config, self._paths, role, str(m.layout)) for role, m in self._meshes.items()},
            kl=self._kl(),
            config_digest=xxhash.xxh3_64_hexdigest(config.model_dump_json().encode()),
            time=time.time(),
        )

    def _failed(self, step: int, error: RealsysError) -> CheckpointError:
        latest = self.latest
        kept = f"the last complete one is {latest}" if latest else "there is no complete one"
        failure = CheckpointError(f"master_worker: the checkpoint of step {step} failed: {error}; {kept}")
        log.error("%s", failure)
        return failure


def describe_role(config: Config, paths: TrialPaths, role: str, layout: str) -> RoleState:
    """What a trial that continues ``role`` must have in common with it. Raises ModelError for an unusable model."""
    settings = role_settings(config, role)
    sizes = asdict(read_sizes(settings.model_dir(paths), settings.head)) | {"lora_rank": settings.lora.rank}
    return RoleState(sizes, settings.optimizer.name, layout)


# ---- on disk


def prepare(root: Path, step: int, incarnation: str = "") -> Path:
    """Make the empty ``.tmp`` folder of a checkpoint; what a killed run left half written or half removed goes, and
    what recovery set aside as damaged.

    The folder is that of one ``incarnation`` of the training side: a rank of an earlier one that was suspended, and
    wakes up to write, must not write among the files of this one. Raises CheckpointError.
    """
    for folder in sorted(root.glob("step-*")):
        if folder.suffix or not (folder / files.STATE).exists():
            _remove(folder)
    final = root / files.directory_name(step)
    if final.exists():
        raise CheckpointError(f"{final} exists already; a checkpoint is written once")
    tmp = root / ".".join(filter(None, (final.name, incarnation, "tmp")))
    try:
        root.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
    except OSError as error:
        raise CheckpointError(f"{tmp} cannot be made: {error.strerror}") from error
    return tmp


def commit(tmp: Path, state: CheckpointState, stems: Sequence[str], check_alive: CheckAlive = unleased) -> Path:
    """Turn a ``.tmp`` folder with the files of ``stems`` into a checkpoint; returns its final folder.

    Every rank has synced its two files already. Raises CheckpointError when one is missing or is not what its writer
    says, or state.json cannot be written; the folder then stays ``.tmp`` and is never loaded.
    """
    found: dict[str, FileInfo] = {}
    for stem in stems:
        path = tmp / files.index_file(stem)
        raw = files.read(path)
        index = files.decode(raw, RankIndex, path)
        if index.step != state.step:
            raise CheckpointError(f"{path} is of step {index.step}, not of step {state.step}")
        files.check_size(tmp / files.data_file(stem), index.file)
        found[files.data_file(stem)] = index.file
        found[path.name] = FileInfo(len(raw), xxhash.xxh3_64_hexdigest(raw))
    final = tmp.with_name(files.directory_name(state.step))
    try:
        failpoint("checkpoint.commit")
        check_alive()
        write_durably(tmp / files.STATE, files.encode_state(msgspec.structs.replace(state, files=found)))
        fsync_directory(tmp)
        check_alive()  # again: that took a while, and what is renamed now is what recovery goes on from
        tmp.rename(final)
        fsync_directory(final.parent)
    except OSError as error:
        raise CheckpointError(f"{tmp}: {files.STATE} cannot be written: {error.strerror}") from error
    failpoint("checkpoint.complete", final)
    return final


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` complete checkpoints; returns what went. One that stays is named in the log,
    and tried again before the next checkpoint: the new one is complete all the same.
    """
    return [path for _, path in files.complete_checkpoints(root)[:-keep] if _remove(path)]


def _remove(folder: Path) -> bool:
    """state.json goes first: a reader who comes meanwhile finds an incomplete checkpoint, not a broken one."""
    try:
        (folder / files.STATE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        log.error("%s cannot be removed now: %s", folder, error.strerror)
        return False
    return True

"""Checkpoints of a trial: the moment to take one, its completion, the ones that are kept. No torch.

    first      ──> a warmed-up or resumed state, so that no recovery has to make it again
    after_step ──> .tmp folder ──> save_checkpoint to every saved role ──> the next step trains
                                      each rank: copy to host memory, then a thread writes files
    after_step ──> all indexes there? ──> finish_checkpoint ──> commit ──> prune

Consumes: the end of a train step. Waits for: the copies; the files only if the next checkpoint is due
or the run ends. Produces: ``{trial}/checkpoints/step-00000010/``
(``realsys.train.checkpoint.checkpoint_files``). At most one checkpoint is being written. If one cannot
be written the run ends with CheckpointError, and the complete ones stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import xxhash

from realsys.cluster.aio import on_disk
from realsys.cluster.commit_folder import checksum_of
from realsys.cluster.failpoint import failpoint
from realsys.cluster.files import FileInfo
from realsys.cluster.lease import CheckAlive, unleased
from realsys.cluster.topology import Mesh
from realsys.config.dataflow import role_settings
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import CheckpointError, RealsysError
from realsys.manager.messages import DataPosition
from realsys.model_calls import Empty
from realsys.model_files.config_json import read_sizes
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointState, RoleState
from realsys.train.requests import FinishCheckpointRequest, LoadCheckpointRequest, SaveCheckpointRequest

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class CheckpointCalls(Protocol):
    """Calls of ``ModelWorkers`` that are used here. Each call goes to the whole mesh of its role."""

    def save_checkpoint(self, payload: SaveCheckpointRequest) -> Awaitable[list[Empty]]: ...
    def finish_checkpoint(self, payload: FinishCheckpointRequest) -> Awaitable[list[Empty]]: ...
    def load_checkpoint(self, payload: LoadCheckpointRequest) -> Awaitable[list[Empty]]: ...


@dataclass(frozen=True, slots=True)
class CheckpointSources:
    """Parts of the MasterWorker that a checkpoint consists of.

    meshes    mesh of each saved role
    workers   calls to their ranks
    position  asks the manager for the position in the data
    kl        returns the state of the KL controller
    """

    meshes: Mapping[str, Mesh]
    workers: CheckpointCalls
    position: Callable[[], Awaitable[DataPosition]]
    kl: Callable[[], dict[str, float]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A checkpoint whose files are being written. ``state`` lacks only the files."""

    directory: Path
    state: CheckpointState


class Checkpoints:
    """Takes and keeps the checkpoints of one trial, and loads the one that training starts from."""

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        sources: CheckpointSources,
        *,
        incarnation: str = "",
        check_alive: CheckAlive = unleased,
    ) -> None:
        """``incarnation``: id of this trainer, whose lease ``check_alive`` checks."""
        self._config = config
        self._paths = paths
        self._sources = sources
        self._incarnation = incarnation
        self._check_alive = check_alive
        self._running: _Running | None = None
        self._newest_step = 0  # trained
        self._saved_step = 0

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint of this trial."""
        complete = files.complete_checkpoints(self._paths.checkpoints)
        return complete[-1][1] if complete else None

    async def after_step(self, step: int) -> None:
        """Take a checkpoint if one is due. Call it once ``step`` is trained and reported.

        The versions of earlier steps must be published: this completes their checkpoints.

        Raises CheckpointError.
        """
        self._newest_step = step
        await self._complete(wait=False)
        every = self._config.checkpoint.every_steps
        if every and step % every == 0:
            await self._begin(step)

    async def first(self, step: int) -> None:
        """Take a checkpoint of the state that training starts from, which no checkpoint of this trial has.

        Returns when it is on disk: until then a failure would cost the warm-up. Raises CheckpointError.
        """
        settings = self._config.checkpoint
        if settings.every_steps or settings.on_stop:
            await self._begin(step)
            await self._complete(wait=True)

    async def save(self) -> None:
        """Take a checkpoint of the last step, which is published, unless it has one; return when it is on disk.

        Raises CheckpointError.
        """
        if self._newest_step > self._saved_step:
            await self._begin(self._newest_step)
        await self._complete(wait=True)

    async def finish(self, *, stopped: bool) -> None:
        """Complete all checkpoints after the last step, which is published; return when they are on disk.

        Raises CheckpointError.
        """
        settings = self._config.checkpoint
        if settings.on_stop if stopped else settings.at_end:
            await self.save()
        await self._complete(wait=True)

    async def load(self, directory: Path) -> CheckpointState:
        """Load a checkpoint into every saved role. Raises RealsysError, which names the part that does not fit."""
        state = await self._on_disk(directory, lambda: files.read_state(directory))
        requests = [LoadCheckpointRequest(role, str(directory)) for role in self._sources.meshes]
        await asyncio.gather(*(self._sources.workers.load_checkpoint(request) for request in requests))
        self._newest_step = state.step
        self._saved_step = state.step
        return state

    async def _begin(self, step: int) -> None:
        """Start a checkpoint; return when every rank has its copy, because the next step changes the originals."""
        await self._complete(wait=True)
        self._saved_step = step
        try:
            root = self._paths.checkpoints
            self._check_alive()  # prepare() deletes unfinished folders: a successor may be writing one
            directory = await self._on_disk(root, lambda: prepare(root, step, self._incarnation))
            state = self._state(step, await self._sources.position())
            requests = [SaveCheckpointRequest(role, step, str(directory)) for role in self._sources.meshes]
            await asyncio.gather(*(self._sources.workers.save_checkpoint(request) for request in requests))
        except RealsysError as error:
            raise self._failed(step, error) from error
        self._running = _Running(directory, state)

    async def _complete(self, *, wait: bool) -> None:
        """Complete the checkpoint that is being written; without ``wait`` only if every rank is done."""
        running = self._running
        if running is None:
            return
        tmp = running.directory
        if not (wait or await self._on_disk(tmp, lambda: self._is_written(tmp))):
            return
        self._running = None
        step = running.state.step
        start = time.perf_counter()
        try:
            requests = [FinishCheckpointRequest(role, step) for role in self._sources.meshes]
            await asyncio.gather(*(self._sources.workers.finish_checkpoint(request) for request in requests))
            stems = self._stems()
            final = await self._on_disk(tmp, lambda: commit(tmp, running.state, stems, self._check_alive))
            root, keep = self._paths.checkpoints, self._config.checkpoint.keep
            pruned = await self._on_disk(root, lambda: prune(root, keep))
        except RealsysError as error:
            raise self._failed(step, error) from error
        seconds = time.perf_counter() - start
        log.info("checkpoint %s is complete, waited %.3f s for it, pruned %d", final, seconds, len(pruned))

    async def _on_disk(self, path: Path, work: Callable[[], Result]) -> Result:
        return await on_disk(f"checkpoint in {path}", self._config.cluster.request_timeout_s, work)

    def _is_written(self, directory: Path) -> bool:
        """Return True if no rank is writing any more: all are done, or one has failed.

        The failed rank raises its error in ``finish_checkpoint``.
        """
        names = {path.name for path in directory.iterdir()}
        stems = self._stems()
        failed = any(files.failure_file(stem) in names for stem in stems)
        return failed or all(files.index_file(stem) in names for stem in stems)

    def _stems(self) -> list[str]:
        return [
            files.rank_stem(role, rank, mesh.layout.world_size)
            for role, mesh in self._sources.meshes.items()
            for rank in range(mesh.layout.world_size)
        ]

    def _state(self, step: int, position: DataPosition) -> CheckpointState:
        config = self._config
        meshes = self._sources.meshes
        return CheckpointState(
            step=step,
            version=step,
            seed=config.seed,
            batch_groups=config.train.batch_groups,
            position=position,
            roles={role: describe_role(config, self._paths, role, str(mesh.layout)) for role, mesh in meshes.items()},
            kl=self._sources.kl(),
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
    """Return the facts about ``role`` that a trial must share to continue it.

    Raises ModelError for an unusable model.
    """
    settings = role_settings(config, role)
    sizes = asdict(read_sizes(settings.model_dir(paths), settings.head)) | {"lora_rank": settings.lora.rank}
    return RoleState(sizes, settings.optimizer.name, layout)


# ---- on disk


def prepare(root: Path, step: int, incarnation: str = "") -> Path:
    """Make the empty ``.tmp`` folder of a checkpoint. Raises CheckpointError.

    Everything unfinished is removed first: folders of a killed run, and those that recovery set aside
    as damaged. The name has the incarnation of the trainer: a rank of an earlier trainer that was
    suspended, and wakes up to write, must not write among the files of this one.
    """
    _log_problems(CHECKPOINT.remove(CHECKPOINT.unfinished(root)).problems)
    final = root / files.directory_name(step)
    if final.exists():
        raise CheckpointError(f"{final} exists already: a checkpoint is written once")
    return CHECKPOINT.prepare(root / ".".join(filter(None, (final.name, incarnation, "tmp"))))


def commit(
    tmp: Path,
    state: CheckpointState,
    stems: Sequence[str],
    check_alive: CheckAlive = unleased,
    final: Path | None = None,
) -> Path:
    """Turn a ``.tmp`` folder with the files of ``stems`` into a checkpoint; return its folder ``final``.

    Without ``final`` it is that of the step among the checkpoints of the trial.

    Every rank has synced its two files already. Raises CheckpointError if one is missing or is not
    what its writer says, or if state.json cannot be written; the folder then stays ``.tmp`` and is
    never loaded.
    """
    listed: dict[str, FileInfo] = {}
    for stem in stems:
        path = tmp / files.index_file(stem)
        data = CHECKPOINT.read_bytes(path)
        index = files.decode_index(data, path)
        if index.step != state.step:
            problem = f"belongs to step {index.step}, not to step {state.step}: an earlier trainer still writes there"
            raise CheckpointError(f"{path} {problem}")
        CHECKPOINT.check_size(tmp / files.data_file(stem), index.file)
        listed[files.data_file(stem)] = index.file
        listed[path.name] = FileInfo(len(data), checksum_of(data))
    final = final or tmp.with_name(files.directory_name(state.step))
    CHECKPOINT.commit(tmp, final, msgspec.structs.replace(state, files=listed), check_alive)
    failpoint("checkpoint.complete", final)
    return final


def prune(root: Path, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` complete checkpoints, and return the removed ones.

    A folder that cannot be removed is logged, and tried again before the next checkpoint: the new
    checkpoint is complete all the same.
    """
    removed = CHECKPOINT.remove(CHECKPOINT.complete(root)[:-keep])
    _log_problems(removed.problems)
    return removed.gone


def _log_problems(problems: Mapping[str, str]) -> None:
    for folder, problem in problems.items():
        log.error("%s %s", folder, problem)

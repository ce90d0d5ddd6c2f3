"""A ModelWorker's share of the record of a step (format: ``record_files``), and of its replay.

    hold      keeps references to the step's arrays: those here, and those that its calls will make
    record    copies the parameters whose checksums it must compute                   training waits
              a thread computes them and writes the arrays, then notifies the master    training continues
    load      puts the arrays back as rollout delivered them, for a replay

The weights that are published are not copied here: the publication has their checksums
(``realsys.train.worker.weight_saver``). A critic is copied, and the adapters under LoRA.

Arrays are never changed in place, so a reference is as good as a copy. One record is written at a time:
if the disk is slower than the training, the next record waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from realsys.cluster.commit_folder import checksum_of
from realsys.config.dataflow import KV_VERSIONS, SOURCE_KEYS, TEACHER, TEMPERATURES, TOKEN_REWARDS
from realsys.errors import StreamError
from realsys.model_calls import Empty, KeepDroppedRequest
from realsys.observe.dropped_groups import DroppedEpisode, DroppedGroup, DroppedWriter, Room
from realsys.train import record_files as files
from realsys.train.megatron.offload import OffloadCopies
from realsys.train.requests import HoldRequest, LoadRecordRequest, Recorded, RecordReply, RecordRequest
from realsys.train.worker.call_handlers import Role, onloaded
from realsys.train.worker.data_manager import Array, DataManager
from realsys.train.worker.weight_saver import checksums_of
from realsys.types import GroupOrigin, Row, SampleMeta

log = logging.getLogger(__name__)

WRITE_S = 60.0  # bound on the wait for the record of the step before


@dataclass(slots=True)
class _Content:
    """This worker's part of one record. ``weights``: role -> copies of its trained parameters."""

    arrays: files.Arrays
    origins: list[GroupOrigin]
    has_file: bool
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


class SampleRecorder:
    """Handles the requests about records. ``notify`` sends the notice, from any thread."""

    def __init__(
        self, worker: int, data: DataManager, roles: Mapping[str, Role], notify: Callable[[Recorded], None]
    ) -> None:
        self._worker = worker
        self._data = data
        self._roles = roles
        self._notify = notify
        self._holds_any = False  # this worker holds arrays of the step
        self._origins: list[GroupOrigin] = []
        self._copies: dict[str, OffloadCopies] = {}  # role -> memory of its copies
        self._thread: threading.Thread | None = None

    def hold(self, request: HoldRequest) -> Empty:
        """Keep references to this worker's arrays of the step that begins."""
        self._holds_any = bool(request.arrays)
        self._origins = self._data.hold(request.arrays)
        return Empty()

    def record(self, request: RecordRequest) -> RecordReply:
        """Copy the parameters, and start to write the held arrays."""
        start = time.perf_counter()
        content = _Content(self._data.release(), self._origins, self._holds_any)
        roles = request.digests.get(self._worker, [])
        if (roles or self._holds_any) and self._is_free(request.step):
            content.weights = {name: self._copy(self._roles[name]) for name in roles}
            # A daemon: a worker that must stop does not wait for a record that no master will complete.
            self._thread = threading.Thread(
                target=self._write, args=(request, content), name=f"record-{request.step}", daemon=True
            )
            self._thread.start()
        return RecordReply(self._worker, time.perf_counter() - start)

    def load(self, request: LoadRecordRequest) -> Empty:
        """Load this worker's arrays. Raises RecordError if its file is damaged.

        A worker that received no sample has no file.
        """
        directory = Path(request.directory)
        if (directory / files.worker_file(self._worker)).exists():
            _, arrays = files.read_worker_file(directory, self._worker)
            for (sample_id, key), array in arrays.items():
                if key in SOURCE_KEYS | TEACHER | {TOKEN_REWARDS, KV_VERSIONS, TEMPERATURES}:
                    self._data.put(sample_id, {key: array})
        return Empty()

    def _is_free(self, step: int) -> bool:
        """Wait for the thread of the record before; return False, and notify the master, if it takes too long."""
        if self._thread is None:
            return True
        self._thread.join(WRITE_S)
        if self._thread.is_alive():  # a second record in memory could end the run, so this one is skipped
            failure = f"model_worker/{self._worker}: {self._thread.name} is not on disk after {WRITE_S:g} s"
            log.error("%s; step %d is not recorded", failure, step)
            self._notify(Recorded(self._worker, step, failure=failure))
            return False
        return True

    def _copy(self, role: Role) -> dict[str, torch.Tensor]:
        """Return copies of the trained parameters, in the memory of those of the record before."""
        assert role.engine.module is not None, "a role is loaded when it is made"
        named = role.engine.module.named_parameters()
        trained = ((name, parameter.detach()) for name, parameter in named if parameter.requires_grad)
        memory = self._copies.setdefault(role.name, OffloadCopies(role.device))
        # Only "all" moves parameters away; the other settings leave them on the device.
        with onloaded(role) if role.settings.offload == "all" else contextlib.nullcontext():
            return memory.take(trained)

    def _write(self, request: RecordRequest, content: _Content) -> None:
        path = Path(request.directory) / files.worker_file(self._worker)
        written = Recorded(self._worker, request.step)
        try:
            if content.has_file:
                data = files.encode_worker_file(self._worker, request.step, content.arrays, content.origins)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                written.size = len(data)
                written.checksum = checksum_of(data)
            written.weights = {role: checksums_of(tensors) for role, tensors in content.weights.items()}
        except OSError as error:
            written.failure = f"model_worker/{self._worker}: {path} cannot be written: {error.strerror}"
            log.error("%s", written.failure)
        try:
            self._notify(written)
        except StreamError as error:  # the connection is closed: this process ends, and the master ignores the record
            log.info("record of step %d: %s", request.step, error)


# ---- groups that the master dropped because they were too old, for people
#
#     master ──keep_dropped──> TooOldGroups ──offer──> DroppedWriter ──thread──> file
#            ──clear─────────> DataManager
#
# The request loop copies at most ``MOST_GROUP_BYTES`` of rows, once per second; a thread writes them
# (``realsys.observe.dropped_groups``).


class TooOldGroups:
    """Handler of the request ``keep_dropped``."""

    def __init__(self, data: DataManager, writer: DroppedWriter) -> None:
        self._data = data
        self._writer = writer

    def keep(self, request: KeepDroppedRequest) -> Empty:
        """Offer a group to the writer. Rows that are not here are left out."""
        origin, arrays = self._data.find([sample.sample_id for sample in request.samples])
        if origin is not None:
            self._writer.offer(lambda: _group(request, origin, arrays))
        return Empty()


def _group(request: KeepDroppedRequest, origin: GroupOrigin, arrays: Mapping[str, Mapping[str, Array]]) -> DroppedGroup:
    room = Room()
    held = [sample for sample in request.samples if sample.sample_id in arrays]
    held.sort(key=lambda sample: (sample.episode, sample.row))
    episodes = [
        _episode(room, list(samples), origin, arrays) for _, samples in groupby(held, lambda sample: sample.episode)
    ]
    return DroppedGroup(
        time=time.time(),
        ticket=origin.ticket,
        worker=origin.worker,
        reason=request.reason,
        prompt="",
        reference=None,
        episodes=episodes,
        next_version=request.next_version,
    )


def _episode(
    room: Room, samples: Sequence[SampleMeta], origin: GroupOrigin, arrays: Mapping[str, Mapping[str, Array]]
) -> DroppedEpisode:
    first = samples[0]
    rows = [
        Row(
            arrays[sample.sample_id]["tokens"],
            arrays[sample.sample_id]["loss_mask"],
            arrays[sample.sample_id]["behav_logprobs"],
            arrays[sample.sample_id]["versions"],
            origin.episodes[sample.episode][sample.row].finish_reason,
        )
        for sample in samples
    ]
    return room.episode(first.episode, rows, first.reward, first.correct)

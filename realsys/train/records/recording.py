"""A ModelWorker's share of the record of a step (format: ``record_files``), and of its replay.

    hold      keeps references to the step's arrays: those here, and those that its calls will make
    record    computes checksums of the parameters                                training waits
              a thread writes the arrays, then notifies the master (``recorded``)    training continues
    load      puts the arrays back as rollout delivered them, for a replay

Arrays are never changed in place, so a reference is as good as a copy. One record is written at a time:
if the disk is slower than the training, the next record waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from realsys.config.dataflow import SOURCE_KEYS, TOKEN_REWARDS
from realsys.errors import StreamError
from realsys.model_calls import Empty
from realsys.storage.commit_folder import checksum_of
from realsys.train.calls import Role
from realsys.train.data_manager import DataManager
from realsys.train.hooks import onloaded
from realsys.train.records import record_files as files
from realsys.train.records.record_messages import HoldRequest, LoadRecordRequest, Recorded, RecordReply, RecordRequest
from realsys.types import GroupOrigin

log = logging.getLogger(__name__)

WRITE_S = 60.0  # bound on the wait for the record of the step before


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
        self._thread: threading.Thread | None = None

    def hold(self, request: HoldRequest) -> Empty:
        """Keep references to this worker's arrays of the step that begins."""
        own = request.arrays.get(self._worker, {})
        self._holds_any = bool(own)
        self._origins = self._data.hold(own)
        return Empty()

    def record(self, request: RecordRequest) -> RecordReply:
        """Return checksums of the parameters, and start to write the held arrays."""
        start = time.perf_counter()
        arrays = self._data.release()
        weights = {name: digest(role) for name, role in self._roles.items() if role.engine.optimizer is not None}
        if self._holds_any:
            self._start_write(request, arrays, self._origins)
        return RecordReply(self._worker, weights, time.perf_counter() - start)

    def load(self, request: LoadRecordRequest) -> Empty:
        """Load this worker's arrays. Raises RecordError if its file is damaged.

        A worker that received no sample has no file.
        """
        directory = Path(request.directory)
        if (directory / files.worker_file(self._worker)).exists():
            _, arrays = files.read_worker_file(directory, self._worker)
            for (sample_id, key), array in arrays.items():
                if key in SOURCE_KEYS or key == TOKEN_REWARDS:
                    self._data.put(sample_id, {key: array})
        return Empty()

    def _start_write(self, request: RecordRequest, arrays: files.Arrays, origins: Iterable[GroupOrigin]) -> None:
        if self._thread is not None:
            self._thread.join(WRITE_S)
            if self._thread.is_alive():  # a second record in memory could end the run, so this one is skipped
                failure = f"model_worker/{self._worker}: {self._thread.name} is not on disk after {WRITE_S:g} s"
                log.error("%s; step %d is not recorded", failure, request.step)
                self._notify(Recorded(self._worker, request.step, failure=failure))
                return
        # A daemon: a worker that must stop does not wait for a record that no master will complete.
        self._thread = threading.Thread(
            target=self._write, args=(request, arrays, origins), name=f"record-{request.step}", daemon=True
        )
        self._thread.start()

    def _write(self, request: RecordRequest, arrays: files.Arrays, origins: Iterable[GroupOrigin]) -> None:
        path = Path(request.directory) / files.worker_file(self._worker)
        written = Recorded(self._worker, request.step)
        try:
            content = files.encode_worker_file(self._worker, request.step, arrays, origins)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.size = len(content)
            written.checksum = checksum_of(content)
        except OSError as error:
            written.failure = f"model_worker/{self._worker}: {path} cannot be written: {error.strerror}"
            log.error("%s", written.failure)
        try:
            self._notify(written)
        except StreamError as error:  # the connection is closed: this process ends, and the master ignores the record
            log.info("record of step %d: %s", request.step, error)


def digest(role: Role) -> dict[str, str]:
    """Return parameter on this rank -> xxh3-64 of its bytes."""
    # Only "all" moves parameters away; the other settings leave them on the device.
    with onloaded(role) if role.settings.offload == "all" else contextlib.nullcontext():
        return {name: checksum_of(content) for name, content in _bytes_of(role)}


@torch.no_grad()
def _bytes_of(role: Role) -> Iterable[tuple[str, memoryview]]:
    assert role.engine.module is not None, "a role is loaded when it is made"
    for name, parameter in role.engine.module.named_parameters():
        flat = parameter.detach().reshape(-1).cpu().contiguous()
        yield name, flat.view(torch.uint8).numpy().data

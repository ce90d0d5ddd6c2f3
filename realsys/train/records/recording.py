"""A ModelWorker's share of the record of a step (format: ``record_files``), and of its replay.

    hold      references to the step's arrays, those here and those that its calls will make
    record    checksums of the parameters                                              training waits
              a thread writes the arrays, then tells the master (notice ``recorded``)  training goes on
    load      the arrays as they came from rollout, for a replay

Arrays are never changed in place, so a reference is a copy. One record is written at a time: on a disk that is slower
than the training, the next one waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import xxhash

from realsys.config.dataflow import SOURCE_KEYS, TOKEN_REWARDS
from realsys.errors import StreamError
from realsys.train.calls import Role
from realsys.train.data_manager import DataManager
from realsys.train.hooks import onloaded
from realsys.train.records import record_files as files
from realsys.train.records.messages import HoldRequest, LoadRecordRequest, Recorded, RecordReply, RecordRequest
from realsys.types import Empty, GroupOrigin

log = logging.getLogger(__name__)

WRITE_S = 60.0  # bound on the wait for the record of the step before


class SampleRecorder:
    """Serves the requests about records. ``tell`` sends the notice, from any thread."""

    def __init__(
        self, worker: int, data: DataManager, roles: Mapping[str, Role], tell: Callable[[Recorded], None]
    ) -> None:
        self._worker, self._data, self._roles, self._tell = worker, data, roles, tell
        self._asked = False  # whether this worker is to hold anything of the step
        self._origins: list[GroupOrigin] = []
        self._thread: threading.Thread | None = None

    def hold(self, request: HoldRequest) -> Empty:
        own = request.arrays.get(self._worker, {})
        self._asked, self._origins = bool(own), self._data.hold(own)
        return Empty()

    def record(self, request: RecordRequest) -> RecordReply:
        start = time.perf_counter()
        arrays, origins = self._data.release(), self._origins
        weights = {name: digest(role) for name, role in self._roles.items() if role.engine.optimizer is not None}
        if self._asked:
            self._write_beside(request, arrays, origins)
        return RecordReply(self._worker, weights, time.perf_counter() - start)

    def load(self, request: LoadRecordRequest) -> Empty:
        """Raises RecordError when this worker's file is damaged; it has none if no sample came to it."""
        directory = Path(request.directory)
        if (directory / files.worker_file(self._worker)).exists():
            _, arrays = files.read_worker_file(directory, self._worker)
            for (sample_id, key), array in arrays.items():
                if key in SOURCE_KEYS or key == TOKEN_REWARDS:
                    self._data.put(sample_id, {key: array})
        return Empty()

    def _write_beside(self, request: RecordRequest, arrays: files.Arrays, origins: Iterable[GroupOrigin]) -> None:
        if self._thread is not None:
            self._thread.join(WRITE_S)
            if self._thread.is_alive():  # a record is not worth more memory, nor the run: this one is left out
                failure = f"model_worker/{self._worker}: {self._thread.name} is not on disk after {WRITE_S:g} s"
                log.error("%s; step %d is not recorded", failure, request.step)
                self._tell(Recorded(self._worker, request.step, failure=failure))
                return
        # A daemon: a worker that is told to stop does not wait for a record that nobody will complete.
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
            written.size, written.checksum = len(content), xxhash.xxh3_64_hexdigest(content)
        except OSError as error:
            written.failure = f"model_worker/{self._worker}: {path} cannot be written: {error.strerror}"
            log.error("%s", written.failure)
        try:
            self._tell(written)
        except StreamError as error:  # the connection is closed: the process ends, and nobody waits for this record
            log.info("record of step %d: %s", request.step, error)


def digest(role: Role) -> dict[str, str]:
    """Parameter on this rank -> xxh3-64 of its bytes."""
    if role.settings.offload == "all":  # else the parameters stay on the device
        with onloaded(role):
            return _digest(role)
    return _digest(role)


def _digest(role: Role) -> dict[str, str]:
    return {name: xxhash.xxh3_64_hexdigest(content) for name, content in _bytes_of(role)}


@torch.no_grad()
def _bytes_of(role: Role) -> Iterable[tuple[str, memoryview]]:
    assert role.engine.module is not None, "a role is loaded when it is made"
    for name, parameter in role.engine.module.named_parameters():
        flat = parameter.detach().reshape(-1).cpu().contiguous()
        yield name, flat.view(torch.uint8).numpy().data

"""Requests about the training state on disk, from the MasterWorker to the ModelWorkers."""

from __future__ import annotations

import msgspec


class SaveCheckpointRequest(msgspec.Struct):
    """Write this rank's share of ``role``'s training state into the existing directory
    ``directory``.

    The reply follows the snapshot. The files are written while training continues
    (``FinishCheckpointRequest``).
    """

    role: str
    step: int
    directory: str


class FinishCheckpointRequest(msgspec.Struct):
    """Wait until the files of the last ``save_checkpoint`` are on disk, synced.

    A failed write raises on this worker.
    """

    role: str
    step: int


class LoadCheckpointRequest(msgspec.Struct):
    """Replace the training state of an initialised ``role`` by that in ``directory``, which any
    layout may have written.
    """

    role: str
    directory: str

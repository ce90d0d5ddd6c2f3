"""Weights staged beside decoding: read, verified and fused in a thread of their own, handed over when complete."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import torch

from realsys.errors import RealsysError
from realsys.generation.backend import Load
from realsys.generation.embedded.forward.weights import ModelWeights, fuse
from realsys.generation.protocol import UpdateResult
from realsys.hf.architecture import HfModel

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Update:
    """One weight update on its way. Its moments are of time.perf_counter."""

    path: str
    version: int
    abort_all: bool
    done: Future[UpdateResult]
    weights: ModelWeights | None = None
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    staged_at: float = 0.0
    swapped_at: float = 0.0
    tokens_before: int = 0  # sampled since the engine's start until then


class Stager:
    """Consumes updates in order, one at a time; produces staged ones for ``on_ready``, or ends them with the reason."""

    def __init__(
        self,
        arch: HfModel,
        load: Load,
        dtype: torch.dtype,
        device: torch.device,
        on_ready: Callable[[Update], None],
    ) -> None:
        self._arch, self._load, self._dtype, self._device = arch, load, dtype, device
        self._on_ready = on_ready
        self._todo: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)

    def put(self, update: Update) -> None:
        self._todo.put(update)

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._todo.put(None)

    def _run(self) -> None:
        while (update := self._todo.get()) is not None:
            start = time.perf_counter()
            try:
                staged = self._load(update.path, update.version)
                loaded = time.perf_counter()
                update.weights = fuse(self._arch, staged.tensors, dtype=self._dtype, device=self._device)
            except Exception as error:  # a boundary: whatever is wrong with a version must not end serving the old one
                level = logging.WARNING if isinstance(error, RealsysError) else logging.ERROR
                unexpected = level == logging.ERROR
                _log.log(level, "update to version %d failed: %s", update.version, error, exc_info=unexpected)
                reason = str(error) if isinstance(error, RealsysError) else f"{type(error).__name__}: {error}"
                with contextlib.suppress(InvalidStateError):  # the engine ended meanwhile and has said so
                    update.done.set_result(UpdateResult(False, reason, {"stage_s": time.perf_counter() - start}))
                continue
            update.staged_at = time.perf_counter()
            update.timings = {
                **{name: float(seconds) for name, seconds in staged.timings.items()},
                "stage_s": update.staged_at - start,
                "fuse_s": update.staged_at - loaded,
            }
            update.counts = dict(staged.counts)
            # What was staged is in the engine's own form now: do not keep it until the next update.
            del staged
            self._on_ready(update)
            del update

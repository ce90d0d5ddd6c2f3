"""Staging of weights while the engine decodes: a thread reads, verifies and fuses them, then hands them over."""

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
from realsys.generation.backend import Load, Staged
from realsys.generation.embedded.forward.weights import ModelWeights, fuse
from realsys.generation.protocol import UpdateResult
from realsys.model_files.architecture import HfModel
from realsys.observe.spans import span

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Update:
    """One weight update in progress. Times are those of time.perf_counter."""

    path: str
    version: int
    abort_all: bool
    done: Future[UpdateResult]
    weights: ModelWeights | None = None  # None if the version has the weights of the one before
    timings: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    staged_at: float = 0.0
    swapped_at: float = 0.0
    tokens_before: int = 0  # tokens sampled from the engine's start to the swap


class Stager:
    """Thread that consumes updates in order, one at a time.

    It hands staged ones to ``on_ready``, and completes the call of a failed one with the reason.
    """

    def __init__(
        self,
        arch: HfModel,
        load: Load,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        on_ready: Callable[[Update], None],
    ) -> None:
        self._arch = arch
        self._load = load
        self._dtype, self._head_dtype = dtypes
        self._device = device
        self._on_ready = on_ready
        self._todo: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)

    def put(self, update: Update) -> None:
        self._todo.put(update)

    def stop(self) -> None:
        """End the thread after the queued updates."""
        self._todo.put(None)

    def _run(self) -> None:
        in_engine = False  # the engine has, or will have, the version that was staged last
        while (update := self._todo.get()) is not None:
            start = time.perf_counter()
            try:
                staged, loaded = self._stage(update, in_engine=in_engine)
            except Exception as error:  # a boundary: a bad version must not stop serving the current one
                in_engine = False
                self._refuse(update, error, time.perf_counter() - start)
                continue
            staged.release()  # fused weights are copies
            in_engine = True
            update.staged_at = time.perf_counter()
            update.timings = {
                **{name: float(seconds) for name, seconds in staged.timings.items()},
                "stage_s": update.staged_at - start,
                "fuse_s": update.staged_at - loaded,
            }
            update.counts = dict(staged.counts)
            # Both names would keep a whole model alive until the next update: the tensors that were read,
            # and the version that the engine replaces later.
            del staged
            self._on_ready(update)
            del update

    def _stage(self, update: Update, *, in_engine: bool) -> tuple[Staged, float]:
        """Read and fuse the weights of ``update``. Returns what was read, and the time at which it was read."""
        with span("stage", f"version/{update.version}"):
            staged = self._load(update.path, update.version, loaded=in_engine)
            loaded = time.perf_counter()
            # Else a version would count as unchanged that equals a refused one.
            if not (staged.unchanged and in_engine):
                update.weights = self._fuse(staged)
        return staged, loaded

    def _fuse(self, staged: Staged) -> ModelWeights:
        return fuse(self._arch, staged.tensors, dtype=self._dtype, device=self._device, head_dtype=self._head_dtype)

    def _refuse(self, update: Update, error: Exception, stage_s: float) -> None:
        """Log why the update failed and report it to the caller."""
        expected = isinstance(error, RealsysError)
        level = logging.WARNING if expected else logging.ERROR
        _log.log(level, "update to version %d failed: %s", update.version, error, exc_info=not expected)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        # InvalidStateError: the engine has ended and has failed all open calls, with this one.
        with contextlib.suppress(InvalidStateError):
            update.done.set_result(UpdateResult(False, reason, {"stage_s": stage_s}))

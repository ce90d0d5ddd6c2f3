"""A rank's copy of a weight version, and its way to the weight transport.

    copy     tensors in HF names to host memory            main thread; training waits
             (with adapters: the frozen ones once, and then the adapters)
    save     checksums, then the transport's writer        background thread; training continues
    digest   checksums only, for a step without a version  background thread

A role has one copy at a time. It stays after it was written: a damaged version is written again from it, when the
parameters have changed since. A further ``copy`` waits until the background thread does not read the one before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from realsys.cluster.commit_folder import checksum_of
from realsys.errors import WeightsError
from realsys.model_calls import Empty
from realsys.train.megatron.offload import OffloadCopies
from realsys.train.requests import CopyWeightsRequest, DigestWeightsRequest, SaveWeightsReply, SaveWeightsRequest
from realsys.train.worker.call_handlers import Role, onloaded
from realsys.weights.contract import Share, WeightWriter
from realsys.weights.disk.dtypes import as_bytes
from realsys.weights.low_rank import AdaptedTensors

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    """The newest copy of a role's share. ``rank`` of ``ranks`` made it."""

    memory: OffloadCopies
    rank: int
    ranks: int
    version: int = -1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    adapted: AdaptedTensors | None = None  # the last ``tensors``, if the role has adapters
    checksums: dict[str, str] = field(default_factory=dict)


class WeightSaver:
    """Copies of one ModelWorker. ``timeout_s`` bounds the wait of ``copy`` for the background thread."""

    def __init__(self, worker: int, writer: WeightWriter, timeout_s: float) -> None:
        self._worker = worker
        self._writer = writer
        self._timeout_s = timeout_s
        self._copies: dict[str, _Copy] = {}
        self._in_use = threading.Lock()  # held while a copy is taken or read

    def copy(self, role: Role, request: CopyWeightsRequest) -> Empty:
        """Copy the weights to host memory, where the next step does not change them. Every rank of the mesh calls it.

        Raises WeightsError if the copy before is still being written after ``timeout_s``.
        """
        with self._exclusive(request):
            start = time.perf_counter()
            if role.name not in self._copies:
                groups = role.groups
                self._copies[role.name] = _Copy(OffloadCopies(role.device), groups.rank, groups.mesh.layout.world_size)
            copy = self._copies[role.name]
            copy.version = -1  # an error leaves neither this version nor the one before
            with onloaded(role):
                # A value head is trained without an adapter.
                if role.settings.lora.rank and role.settings.head == "lm":
                    copy.tensors = copy.adapted = _with_adapters(copy, role)
                else:
                    copy.tensors = copy.memory.take(role.engine.export())
            copy.checksums = {}
            copy.version = request.version
        copied = copy.tensors.factors if isinstance(copy.tensors, AdaptedTensors) else copy.tensors
        size = sum(tensor.nbytes for tensor in copied.values())
        log.info("version %d: copied %.1f MB in %.3f s", request.version, size / 1e6, time.perf_counter() - start)
        return Empty()

    def forget_frozen(self, role: str) -> None:
        """Copy the role's frozen tensors again with the next version: a checkpoint has replaced them."""
        if role in self._copies:
            self._copies[role].adapted = None

    def save(self, request: SaveWeightsRequest) -> SaveWeightsReply:
        """Write the copy of this version through the weight transport. Raises WeightsError."""
        start = time.perf_counter()
        with self._in_use:
            copy = self._digested(request)
            share = Share(request.role, request.version, copy.rank, copy.ranks, request.plan, copy.checksums)
            report = self._writer.write(share, copy.tensors)
        return SaveWeightsReply(report, time.perf_counter() - start, self._worker, copy.checksums)

    def digest(self, request: DigestWeightsRequest) -> SaveWeightsReply:
        """Return the checksums of the copy of this version."""
        start = time.perf_counter()
        with self._in_use:
            checksums = self._digested(request).checksums
        return SaveWeightsReply(None, time.perf_counter() - start, self._worker, checksums)

    def _digested(self, request: SaveWeightsRequest | DigestWeightsRequest) -> _Copy:
        """Return the copy of the version, with its checksums."""
        copy = self._copies.get(request.role)
        if copy is None or copy.version != request.version:
            there = "no version" if copy is None else f"version {copy.version}"
            problem = f"has a copy of {there} of role {request.role!r}, not of version {request.version}"
            raise WeightsError(f"model_worker/{self._worker} {problem}: send 'copy_weights' first")
        if not copy.checksums:
            copy.checksums = checksums_of(copy.tensors)
        return copy

    @contextlib.contextmanager
    def _exclusive(self, request: CopyWeightsRequest) -> Iterator[None]:
        if not self._in_use.acquire(timeout=self._timeout_s):
            problem = f"the version before {request.version} is not written after {self._timeout_s:g} s"
            raise WeightsError(
                f"model_worker/{self._worker}: {problem}: the disk hangs, or is too slow for cluster.request_timeout_s"
            )
        try:
            yield
        finally:
            self._in_use.release()


def _with_adapters(copy: _Copy, role: Role) -> AdaptedTensors:
    """Copy the adapters; with the first version also the frozen tensors."""
    factors = copy.memory.take(role.engine.export("adapters"))
    if copy.adapted is not None:
        return replace(copy.adapted, factors=factors)
    frozen = OffloadCopies(role.device).take(role.engine.export("frozen"))
    lora = role.settings.lora
    return AdaptedTensors(frozen, {}, factors, lora.rank, lora.alpha / lora.rank)


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> xxh3-64 of the tensor's bytes, hex. Those of frozen tensors are computed once."""
    if isinstance(tensors, AdaptedTensors):
        if not tensors.checksums:
            tensors.checksums.update(checksums_of(tensors.frozen))
        merged = {name: checksum_of(as_bytes(tensors[name]).data) for name in tensors.factors}
        return {**tensors.checksums, **merged}
    return {name: checksum_of(as_bytes(tensor).data) for name, tensor in tensors.items()}

"""Moves the memory of a role to the host between its calls, and back; keeps copies of weights there.

It moves storages, not tensors. Parameters and gradients are views into large buffers, and a view
stays valid while the memory under it is released and allocated again.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedRandom
from typing import Literal

import torch

from realsys.errors import WeightsError
from realsys.train.megatron.device import Device

_SPARE = 64 << 20  # bytes of a snapshot that change places at a time


def storages(tensors: Iterable[torch.Tensor], device: Device) -> dict[int, torch.UntypedStorage]:
    """Return the storages under ``tensors`` that take memory of the device, by address."""
    by_address = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.device.type and storage.nbytes():
            by_address[storage.data_ptr()] = storage
    return by_address


class OffloadedMemory:
    """Device memory that is released until ``restore``.

    ``kept`` has a copy in host memory, or in a file if the device is the host; ``scrap`` has none.
    """

    def __init__(self, device: Device, kept: Iterable[torch.UntypedStorage], scrap: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._kept = [(storage, self._copy(storage)) for storage in kept]
        self._scrap = [(tensor, tensor.untyped_storage().nbytes()) for tensor in scrap]
        # The copies are asynchronous: released before they end, the host would get garbage.
        self._finish_copies()
        for storage, _ in self._kept:
            storage.resize_(0)
        for tensor, _ in self._scrap:
            tensor.untyped_storage().resize_(0)
        if device.is_cuda:
            # returns the cached blocks to the driver, for other processes on this device
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again: kept storages as they were, scrap zero. Call it once."""
        for tensor, size in self._scrap:
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
        for storage, host in self._kept:
            if isinstance(host, torch.Tensor):
                storage.resize_(host.numel())
                storage.copy_(host.untyped_storage(), non_blocking=self._device.is_cuda)
            else:
                with host:
                    size = host.tell()
                    storage.resize_(size)
                    host.seek(0)
                    if host.readinto(_bytes_of(storage)) != size:
                        raise WeightsError(f"a file with memory of a role in {tempfile.gettempdir()} was cut short")
        self._finish_copies()

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor | BufferedRandom:
        """Return the content of the storage in host memory; without a GPU, which has no other memory, in a file."""
        if not self._device.is_cuda:
            try:
                file = tempfile.TemporaryFile()  # noqa: SIM115  (``restore`` closes it)
                file.write(_bytes_of(storage))
                file.flush()
            except OSError as error:
                problem = f"memory of a role ({storage.nbytes()} bytes) cannot leave for {tempfile.gettempdir()}"
                raise WeightsError(f"{problem}: {error.strerror}: set TMPDIR to a folder with room") from error
            return file
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        host.untyped_storage().copy_(storage, non_blocking=True)
        return host

    def _finish_copies(self) -> None:
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.device)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    # tensor.numpy() would fix the size of the storage for good
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def offloaded(
    what: Literal["optimizer", "all"],
    device: Device,
    parameters: Iterable[torch.Tensor],
    optimizer_state: Iterable[torch.Tensor],
    gradients: Iterable[torch.Tensor],
) -> OffloadedMemory:
    """Release the memory of a role. Gradients are dropped.

    "optimizer": optimizer state and fp32 master weights move to the host. "all": the parameters move too.
    """
    # Storages, not tensors: many parameters are views into one buffer, which moves as a whole.
    weights, kept = storages(parameters, device), storages(optimizer_state, device)
    if what == "all":
        kept |= weights
    else:
        # Without master weights the optimizer steps the parameters themselves; the next forward pass needs them here.
        kept = {address: storage for address, storage in kept.items() if address not in weights}
    return OffloadedMemory(device, kept.values(), gradients)


class OffloadCopies:
    """Copies of named tensors in host memory. The memory is allocated once and used again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return contiguous copies of ``tensors``, which are complete. They overwrite those of the call before."""
        copies = {}
        for name, tensor in tensors:
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # pinned, so that the copy of one tensor runs while the next one is gathered
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._device.is_cuda)
            copies[name] = copy.copy_(tensor, non_blocking=self._device.is_cuda)
        if self._device.is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()
        self._copies = copies
        return copies


class WeightSnapshot:
    """Copy of ``parameters`` as they were at ``version``. It costs their size in host memory.

        take ──> copied in a thread, while further calls run ──> finish, before the parameters change

    ``timeout_s`` bounds the wait of ``finish``.
    """

    def __init__(self, device: Device, parameters: Iterable[torch.nn.Parameter], timeout_s: float) -> None:
        self.version = -1
        self._device = device
        self._parameters = {str(number): each.detach() for number, each in enumerate(parameters)}
        self._timeout_s = timeout_s
        self._memory = OffloadCopies(device)
        self._thread = ThreadPoolExecutor(1, "weight-snapshot")
        self._copies: Future[dict[str, torch.Tensor]] = Future()

    def take(self, version: int) -> None:
        """Begin to copy the parameters, which are those of ``version``. They must stay as they are until ``finish``."""
        self.version = version
        written = torch.cuda.current_stream(self._device.device).record_event() if self._device.is_cuda else None
        self._copies = self._thread.submit(self._copy, written)

    def finish(self) -> dict[str, torch.Tensor]:
        """Return the copies when they are complete. Raises WeightsError after ``timeout_s``."""
        try:
            return self._copies.result(self._timeout_s)
        except TimeoutError:
            problem = f"the copy of version {self.version} takes longer than {self._timeout_s:g} s"
            raise WeightsError(f"{problem} (cluster.request_timeout_s): the device hangs") from None

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the parameters the values of the snapshot; afterwards they are as before, bit by bit."""
        copies = self.finish()
        largest = max((copy.nbytes for copy in copies.values()), default=0)
        # Allocated before the first value moves: an exchange must not end in the middle.
        spare = torch.empty(min(largest, _SPARE), dtype=torch.uint8, device=self._device.device)
        self._exchange(copies, spare)
        try:
            yield
        finally:
            self._exchange(copies, spare)

    def _copy(self, written: torch.cuda.Event | None) -> dict[str, torch.Tensor]:
        if written is None:
            return self._memory.take(self._parameters.items())
        # On a separate stream the copy neither waits for further calls, nor delays them.
        with torch.cuda.stream(torch.cuda.Stream(self._device.device)):  # type: ignore[no-untyped-call]
            torch.cuda.current_stream(self._device.device).wait_event(written)
            return self._memory.take(self._parameters.items())

    def _exchange(self, copies: Mapping[str, torch.Tensor], spare: torch.Tensor) -> None:
        """Let parameters and copies change places, piece by piece."""
        quick = self._device.is_cuda
        for name, parameter in self._parameters.items():
            inside, outside = (tensor.view(-1).view(torch.uint8) for tensor in (parameter, copies[name]))
            for start in range(0, len(inside), max(1, len(spare))):
                part = slice(start, start + len(spare))
                before = spare[: len(inside[part])].copy_(inside[part])
                # In the order of the stream: each copy reads what the one before has left.
                inside[part].copy_(outside[part], non_blocking=quick)
                outside[part].copy_(before, non_blocking=quick)
        if quick:
            torch.cuda.current_stream(self._device.device).synchronize()

"""Memory of a role that waits for its next call: to the host and back.

What is moved are storages, not tensors: parameters and gradients are views into large buffers, and the views stay
valid while the memory under them goes and comes back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from realsys.train.megatron.device import Device


def storages(tensors: Iterable[torch.Tensor], device: Device) -> dict[int, torch.UntypedStorage]:
    """The storages under ``tensors`` that take memory of the device, by address."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.device.type and storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


class OffloadedMemory:
    """Device memory that is released for as long as this exists, with a host copy of ``kept``; ``scrap`` has none."""

    def __init__(self, device: Device, kept: Iterable[torch.UntypedStorage], scrap: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._kept = [(storage, self._host_copy(storage)) for storage in kept]
        self._scrap = [(tensor, tensor.untyped_storage().nbytes()) for tensor in scrap]
        self._finish_copies()
        for storage, _ in self._kept:
            storage.resize_(0)
        for tensor, _ in self._scrap:
            tensor.untyped_storage().resize_(0)
        if device.is_cuda:
            torch.cuda.empty_cache()  # for other processes on this device

    def give_back(self) -> None:
        """Everything kept as it was; scrap is zero. Once."""
        for tensor, size in self._scrap:
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
        for storage, host in self._kept:
            storage.resize_(host.numel())
            storage.copy_(host.untyped_storage(), non_blocking=self._device.is_cuda)
        self._finish_copies()

    def _host_copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.is_cuda)
        host.untyped_storage().copy_(storage, non_blocking=self._device.is_cuda)
        return host

    def _finish_copies(self) -> None:
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.device)

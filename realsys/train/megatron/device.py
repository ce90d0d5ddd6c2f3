"""The differences between CPU (gloo) and CUDA (NCCL) ranks, in one place.

Megatron-Core names CUDA in literals (``device="cuda"``, ``tensor.cuda()``, ``param.type()``). On a
machine without CUDA they are redirected while a call into the engine runs; on CUDA they stay as
they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from realsys.cluster.gpu_devices import attention_kernel, choose_device

_FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.tensor, torch.full, torch.arange})
_CUDA_TYPE_OF = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


class _CudaLiteralsOnCpu(TorchFunctionMode):
    """A redirection of Megatron's CUDA literals to the CPU. It costs about a microsecond per
    operation.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": "cpu"}
        elif func is torch.Tensor.cuda:
            return args[0]
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _CUDA_TYPE_OF.get(name, name)
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which this rank computes, and the backend with which its ranks communicate."""

    device: torch.device
    backend: str  # name of a torch.distributed backend

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def active(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for calls into Megatron. Enter it around every one."""
        return contextlib.nullcontext() if self.is_cuda else _CudaLiteralsOnCpu()


def prepare_device(rank: int, threads: int, *, deterministic: bool = False) -> Device:
    """Choose this rank's device, set the thread count, and prepare torch for Megatron.

    ``deterministic``: a GPU adds in the same order in every run. An operation that cannot raises RuntimeError.
    Call it once, before Megatron is imported. Raises DeviceError if the rank was given a GPU and cannot use it, or if
    this torch has no attention kernel for it.
    """
    torch.set_num_threads(threads)
    # Megatron relies on kernels starting in the order they are queued to overlap communication with
    # compute.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = choose_device(rank)
    if device.type == "cuda":
        if deterministic:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # fills tensors with NaN
        attention_kernel()  # a torch without one is found here, not in the first forward pass
        return Device(device, "nccl")
    _stand_in_for_cuda()
    # torch records the last 2,000 collectives, megabytes of memory; gloo has no tool that reads
    # them.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    return Device(device, "gloo")


def seed_megatron(device: Device, seed: int) -> None:
    """Set Megatron's random states.

    The model draws no random numbers (no dropout), but Megatron's layers need the states.
    """
    from realsys.train.megatron.megatron_core import megatron_random

    if device.is_cuda:
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    # The inference tracker forks no state, so it works without CUDA.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Activation recomputation saves and restores the CUDA state around each layer. There is none
    # here.
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.empty(0, dtype=torch.uint8)
    megatron_random._set_cuda_rng_state = lambda *_args, **_kwargs: None
    torch.manual_seed(seed)


def _stand_in_for_cuda() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_args, **_kwargs: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.empty_cache = lambda: None

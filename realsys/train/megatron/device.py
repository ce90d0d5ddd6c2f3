"""What differs between CPU (gloo) and CUDA (NCCL) ranks, in one place.

Megatron-Core names CUDA in literals (``device="cuda"``, ``tensor.cuda()``, ``param.type()``). On a machine without CUDA
those are redirected while an engine call runs; on CUDA nothing is touched.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.overrides import TorchFunctionMode

from realsys.cluster.network import advertised_host
from realsys.errors import ConfigError

_FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.tensor, torch.full, torch.arange})
_CUDA_TYPE_OF = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


class _CudaLiteralsOnCpu(TorchFunctionMode):
    """Redirects Megatron's CUDA literals to the CPU; about a microsecond per operation."""

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
    """Where this rank computes, and how its ranks talk."""

    device: torch.device
    backend: str  # of torch.distributed

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def active(self) -> contextlib.AbstractContextManager[object]:
        """Enter around every call into Megatron."""
        return contextlib.nullcontext() if self.is_cuda else _CudaLiteralsOnCpu()


def prepare_device(rank: int, threads: int) -> Device:
    """Pick this rank's device, set the thread count, and make Megatron run on it. Once per process, before Megatron."""
    torch.set_num_threads(threads)
    # Megatron relies on kernels starting in the order they are queued to overlap communication with compute.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        index = rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), "nccl")
    _stand_in_for_cuda()
    # A record of the last 2,000 collectives, megabytes of it, that nobody asks gloo for.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    return Device(torch.device("cpu"), "gloo")


def seed_megatron(device: Device, seed: int) -> None:
    """Megatron's random states. Nothing of ours draws from them (no dropout), but its layers ask for them."""
    from realsys.train.megatron.megatron_core import megatron_random

    if device.is_cuda:
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    # The inference tracker forks nothing, so it needs no CUDA state.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    # Activation recomputation saves and restores "the CUDA state" around each layer.
    megatron_random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.empty(0, dtype=torch.uint8)
    megatron_random._set_cuda_rng_state = lambda *_args, **_kwargs: None
    torch.manual_seed(seed)


def bind_gloo_to(host: str) -> None:
    """Make gloo listen on the interface that has ``host``, not on whatever the host name resolves to.

    A trial on one machine must not open ports beyond loopback. An explicit GLOO_SOCKET_IFNAME wins.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or advertised_host(host) != host:  # every interface: gloo asks the host name
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(_same_address(entry.address, host) for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
    raise ConfigError("cluster.host", host, "no network interface of this machine has this address")


def _same_address(found: str, wanted: str) -> bool:
    try:
        return ipaddress.ip_address(found.split("%")[0]) == ipaddress.ip_address(wanted)
    except ValueError:  # a hardware address, or wanted is a host name
        return wanted == "localhost" and found == "127.0.0.1"


def _stand_in_for_cuda() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.empty_cache = lambda: None

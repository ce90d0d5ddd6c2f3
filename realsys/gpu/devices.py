"""Choice of the device of a process. A process that was given a GPU uses it or ends; it never falls back to the CPU.

One rank on the CPU in a world of GPUs would hang all: gloo and NCCL ranks wait for each other.

    CUDA_VISIBLE_DEVICES    GPUs       torch        device
    unset                   none       any          cpu
    unset                   present    CPU build    cpu
    unset                   present    CUDA build   cuda, or DeviceError
    an id                   any        any          cuda, or DeviceError
    empty, -1, NoDevFiles   any        any          cpu
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from realsys.config.rules.machine import VISIBLE
from realsys.errors import DeviceError
from realsys.gpu.environment import ALLOCATOR, EXPANDABLE, is_given_gpu

log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


def choose_device(index: int = 0, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device of this process, and make it torch's current one. ``index`` counts the visible GPUs around.

    Raises DeviceError if the process was given a GPU and cannot use it.
    """
    if not is_given_gpu(environment):
        return torch.device("cpu")
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise DeviceError(_problem("torch finds no CUDA device", environment))
        device = torch.device("cuda", index % count)
        torch.cuda.set_device(device)
        _allocate(device, environment)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise DeviceError(_problem(cause, environment)) from error
    return device


def _allocate(device: torch.device, environment: Mapping[str, str]) -> None:
    """Make the context: a GPU that is lost, full or held exclusively fails here. Raises RuntimeError.

    Expandable segments need the driver's management of virtual memory, which some virtual machines lack.
    """
    try:
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if environment.get(ALLOCATOR) != EXPANDABLE:
            raise
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch.zeros(1, device=device)
        cause = str(error).strip().partition("\n")[0]
        log.warning("without expandable segments, which this GPU refuses: %s; memory may break into pieces", cause)


def _problem(cause: str, environment: Mapping[str, str]) -> str:
    visible = environment.get(VISIBLE, "not set")
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU only"
    return (
        f"this process was given a GPU and cannot use it: {cause} (driver {_driver()}; torch {torch.__version__}, "
        f"built {build}; CUDA_VISIBLE_DEVICES={visible}): install a torch that fits the driver, free or repair the "
        "GPU, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
    )


def _driver() -> str:
    """Return the version of the NVIDIA driver in the kernel."""
    try:
        words = _DRIVER.read_text("utf-8").split()
    except OSError:
        return "not loaded"
    return next((word for word in words if word[0].isdigit()), "of unknown version")

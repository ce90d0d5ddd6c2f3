"""Environment variables of processes on GPUs, set before torch is imported. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

from realsys.config.rules.machine import VISIBLE, visible_gpus

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLDER_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch still reads it


def names_gpu(environment: Mapping[str, str]) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES names a GPU, whether or not this machine has it."""
    return bool(visible_gpus(environment.get(VISIBLE, ""), present=sys.maxsize))


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the allocator of a training rank, unless the user has set it.

    Micro-batches are of ever different sizes. Without expandable segments the free memory ends up in pieces, and a run
    goes out of memory after hours.
    """
    if names_gpu(environment) and _OLDER_ALLOCATOR not in environment:
        environment.setdefault(_ALLOCATOR, "expandable_segments:True")

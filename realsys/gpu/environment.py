"""Environment variables of processes on GPUs, set before torch is imported. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

from realsys.config.rules.machine import VISIBLE, Machine, visible_gpus

ALLOCATOR, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
#: variables without which sums depend on the order in which threads or GPUs arrive; torch demands the first one
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
_OLDER_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # torch still reads it


def names_gpu(environment: Mapping[str, str]) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES names a GPU, whether or not this machine has it."""
    return bool(visible_gpus(environment.get(VISIBLE, ""), present=sys.maxsize))


def is_given_gpu(environment: Mapping[str, str]) -> bool:
    """Return True if a process with this environment must compute on a GPU."""
    if VISIBLE in environment:
        return names_gpu(environment)
    return bool(Machine.here(environment).trainer_gpus)


def prepare_environment(environment: MutableMapping[str, str], *, deterministic: bool = False) -> None:
    """Set the allocator of a training rank, and what ``train.deterministic`` needs, unless the user has set it.

    Micro-batches are of ever different sizes. Without expandable segments the free memory ends up in pieces, and a run
    goes out of memory after hours.
    """
    if not is_given_gpu(environment):
        return
    if _OLDER_ALLOCATOR not in environment:
        environment.setdefault(ALLOCATOR, EXPANDABLE)
    if deterministic:
        for name, value in _DETERMINISTIC.items():
            environment.setdefault(name, value)

"""Environment variables of processes on GPUs, set before torch is imported. No torch."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.config.machine import VISIBLE, Machine, visible_gpus

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


# ---- CPU cores near the GPUs of a process. No torch: a process is bound before torch starts its threads
#
#     CUDA_VISIBLE_DEVICES ──/proc/driver/nvidia──> PCI addresses ──/sys──> NUMA nodes ──/sys──> cores
#
# Copies between a GPU and the memory of another socket take a slower path, and Linux puts pages where the thread that
# touches them first runs.


log = logging.getLogger(__name__)

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process can open. ``address`` is that of its PCI device."""

    address: str
    uuid: str


def bind_to_gpus(environment: Mapping[str, str] = os.environ, root: Path = _ROOT) -> frozenset[int]:
    """Bind this thread, and threads that it starts, to the cores near the visible GPUs.

    Returns these cores; empty if the process has no GPU, or if the kernel does not say where its GPUs are.
    """
    if not names_gpu(environment):
        return frozenset()
    gpus = present_gpus(root)
    cores = cores_near(visible_gpus(environment[VISIBLE], len(gpus)), gpus, root) & os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
        log.info("bound to CPU cores %s, near GPU %s", as_cpu_list(cores), environment[VISIBLE])
    return cores


def present_gpus(root: Path = _ROOT) -> list[Gpu]:
    """Return the GPUs in the order in which CUDA counts them: by PCI address. A cgroup may hide some."""
    found = []
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*"), key=lambda path: path.name.lower()):
        text = _text(folder / "information")
        minor, uuid = (re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE) for name in ("Device Minor", "GPU UUID"))
        if minor is not None and (root / f"dev/nvidia{minor[1]}").exists():
            found.append(Gpu(folder.name.lower(), uuid[1] if uuid is not None else ""))
    return found


def cores_near(ids: Sequence[str], gpus: Sequence[Gpu], root: Path = _ROOT) -> frozenset[int]:
    """Return the cores of the NUMA nodes of the GPUs ``ids``; empty if one of them has no known node."""
    cores = frozenset[int]()
    for each in ids:
        chosen = [gpu for number, gpu in enumerate(gpus) if each == str(number) or (gpu.uuid and gpu.uuid == each)]
        node = _text(root / "sys/bus/pci/devices" / chosen[0].address / "numa_node").strip() if chosen else ""
        if not node.isdigit():  # -1: the firmware does not say
            return frozenset()
        cores |= parse_cpu_list(_text(root / f"sys/devices/system/node/node{node}/cpulist"))
    return cores


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's form of a set of cores: ``0-3,8``."""
    cores = frozenset[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= frozenset(range(int(first), int(last or first) + 1))
    return cores


def as_cpu_list(cores: frozenset[int]) -> str:
    """Return a set of cores in the kernel's form."""
    starts = sorted(core for core in cores if core - 1 not in cores)
    ends = sorted(core for core in cores if core + 1 not in cores)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""

"""CPU cores near the GPUs of a process. No torch: a process is bound before torch starts its threads.

    CUDA_VISIBLE_DEVICES ──/proc/driver/nvidia──> PCI addresses ──/sys──> NUMA nodes ──/sys──> cores

Copies between a GPU and the memory of another socket take a slower path, and Linux puts pages where the thread that
touches them first runs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.config.rules.machine import VISIBLE, visible_gpus
from realsys.gpu.environment import names_gpu

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

"""Free memory of the host within the limits of this process's cgroups, and the memory of its GPUs. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_GIB = 1 << 30
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 10.0  # a driver without persistence mode starts in some seconds


def free_host_bytes(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the memory that this process may still take: that of the node, or what a cgroup leaves of its limit.

    SLURM's ``--mem`` and a container's limit are cgroups, of version 1 or 2. A limit of any cgroup above counts, too.
    A SLURM without cgroups kills the job beyond the limit in the environment. ``root`` has ``proc`` and ``sys``.
    """
    return max(0, min([_available(root), *_left_in_cgroups(root), *_limit_of_slurm(environment)]))


def _limit_of_slurm(environment: Mapping[str, str]) -> Iterator[int]:
    per_node, per_core = (environment.get(f"SLURM_MEM_PER_{part}", "") for part in ("NODE", "CPU"))
    if per_node.isdigit() and int(per_node):  # 0: all that the node has
        yield int(per_node) << 20
    elif per_core.isdigit() and environment.get("SLURM_CPUS_ON_NODE", "").isdigit():
        yield (int(per_core) << 20) * int(environment["SLURM_CPUS_ON_NODE"])


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * _GIB  # kernels before 3.14 do not report it


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield limit minus usage of each cgroup with a limit, from the own one up to the root."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names, base = ("memory.max", "memory.current", "inactive_file"), mount
        elif "memory" in controllers.split(","):
            names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), mount / "memory"
        else:
            continue
        # Inside a container the path may be that of the host, which is not mounted: then only parts of it exist.
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if (left := _left_in(each, *names)) is not None:
                yield left
            if each == base:
                break


def _left_in(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return what one cgroup leaves; None without a limit. The kernel drops inactive file pages before it refuses."""
    try:
        limit, usage = ((folder / name).read_text("ascii").strip() for name in (limit_name, usage_name))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - int(usage) + int(statistics.get(cache_name, 0))


def gpu_bytes(gpus: Collection[str]) -> int:
    """Return the memory of the smallest of these GPUs (ids of CUDA_VISIBLE_DEVICES); 0 if it is not known."""
    if not gpus:
        return 0
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return smallest_gpu(listed, gpus)


def smallest_gpu(listed: str, gpus: Collection[str]) -> int:
    """Return the memory of the smallest of ``gpus`` in nvidia-smi's lines ``index, uuid, MiB``; 0 if none is there.

    An id may be the beginning of a uuid. A part of a GPU (MIG) is not listed.
    """
    sizes = []
    for line in listed.splitlines():
        index, uuid, size = (part.strip() for part in line.split(","))
        is_named = any(gpu == index or (gpu.startswith("GPU-") and uuid.startswith(gpu)) for gpu in gpus)
        if is_named and size.isdigit():
            sizes.append(int(size) << 20)
    return min(sizes, default=0)

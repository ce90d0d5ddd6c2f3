"""CPU cores, free memory, GPUs and ports of this machine, and of the nodes of a plan.

Every process imports it with ``realsys.cluster``, so it imports neither torch nor pydantic.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.errors import ConfigError

if TYPE_CHECKING:
    from realsys.config.schema_cluster import ClusterConfig


_GIB = 1 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 10.0  # a driver without persistence mode starts in some seconds
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """Resources of one machine. ``memory`` is free bytes; 0 cores or bytes: not known.

    light       it has the processes other than training ranks and servers, and no other node has them
    gpu_memory  bytes of its smallest GPU
    """

    name: str
    cpus: int
    memory: int
    gpus: int
    light: bool = False
    gpu_memory: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of one node. ``gpus`` are ids for CUDA_VISIBLE_DEVICES; ``gpu_bytes``: of the smallest, 0: unknown."""

    cpus: int
    memory_bytes: int  # available now
    gpus: tuple[str, ...] = ()
    torch_has_cuda: bool = False
    gpu_bytes: int = 0

    def node(self) -> NodeDevices:
        """Return this machine as the only node of a plan."""
        return NodeDevices("this machine", self.cpus, self.memory_bytes, len(self.gpus))

    def planned(self, cluster: ClusterConfig) -> Machine:
        """Return the machine for which a trial is planned: a node as ``cluster`` describes it, else this machine.

        The torch of another machine is taken to be a CUDA build.
        """
        if not cluster.nodes:
            return self
        gpus = tuple(map(str, range(cluster.gpus_per_node)))
        memory = int(cluster.memory_gb_per_node * _GIB)
        return Machine(cluster.cpus_per_node, memory, gpus, True, int(cluster.gpu_memory_gb * _GIB))

    @property
    def trainer_gpus(self) -> tuple[str, ...]:
        """GPUs that the torch of this interpreter can use. SGLang may run in another interpreter."""
        return self.gpus if self.torch_has_cuda else ()

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Machine:
        """Return the resources of the machine that runs this process."""
        gpus = own_gpus(environment)
        return cls(
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=free_host_bytes(),
            gpus=gpus,
            torch_has_cuda=_torch_has_cuda(),
            gpu_bytes=gpu_bytes(gpus),
        )


# ---- GPUs that a process may use


def own_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the ids of the GPUs that this process may use. Raises ConfigError."""
    return visible_gpus(environment.get(VISIBLE), _present_gpus())


def visible_gpus(chosen: str | None, present: int) -> tuple[str, ...]:
    """Return the ids of the GPUs that CUDA shows to a process. Raises ConfigError if one is listed twice.

    ``chosen``: CUDA_VISIBLE_DEVICES, if it is set; ``present``: number of GPUs. Like CUDA, ignore everything from the
    first entry on that is no GPU: -1, NoDevFiles, a number that is too large.
    """
    if chosen is None:
        return tuple(map(str, range(present)))
    ids = [part.strip() for part in chosen.split(",")]
    valid = list(itertools.takewhile(lambda each: _is_gpu(each, present), ids))
    if len(set(valid)) < len(valid):
        raise ConfigError(VISIBLE, chosen, "names a GPU twice: name each GPU once")
    return tuple(valid)


def _is_gpu(name: str, present: int) -> bool:
    return int(name) < present if name.isdigit() else present > 0 and name.startswith(("GPU-", "MIG-"))


def _present_gpus() -> int:
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def visible_to(gpus: Sequence[int], ids: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that may use ``gpus``, indexes into ``ids``; without indexes it sees none."""
    return {VISIBLE: ",".join(ids[gpu] for gpu in gpus)} if ids else {}


def _torch_has_cuda() -> bool:
    """Return True if the installed torch is a CUDA build. Reads its version file, since importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b.*=\s*['\"]", version.read_text("utf-8"), re.MULTILINE) is not None


def gpu_bytes(gpus: Collection[str]) -> int:
    """Return the memory of the smallest of these GPUs (ids of CUDA_VISIBLE_DEVICES); 0 if it is not known."""
    return smallest_gpu(_list_gpus(), gpus) if gpus else 0


def free_gpu_share(gpus: Collection[str]) -> float:
    """Return the share of its memory that the fullest of these GPUs has free; 1 if it is not known."""
    listed = _memory_of(_list_gpus(), gpus) if gpus else ()
    return min((free / total for total, free in listed), default=1.0)


def smallest_gpu(listed: str, gpus: Collection[str]) -> int:
    """Return the memory of the smallest of ``gpus`` in nvidia-smi's lines; 0 if none is there."""
    return min((total << 20 for total, _ in _memory_of(listed, gpus)), default=0)


def _list_gpus() -> str:
    try:
        return subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _memory_of(listed: str, gpus: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield MiB of all and of free memory of ``gpus``, from lines ``index, uuid, all, free``.

    An id may be the beginning of a uuid. A part of a GPU (MIG) is not listed.
    """
    for line in listed.splitlines():
        index, uuid, total, free = (part.strip() for part in line.split(","))
        is_named = any(gpu == index or (gpu.startswith("GPU-") and uuid.startswith(gpu)) for gpu in gpus)
        if is_named and total.isdigit() and free.isdigit():
            yield int(total), int(free)


# ---- free memory of the host, within the limits of this process's cgroups


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


# ---- ports on which the processes of a trial listen


def port_range(text: str) -> range:
    """Return the ports that the field ``cluster.ports`` names: low-high; no port for "". Raises ConfigError."""
    if not text:
        return range(0)
    parts = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if parts is None:
        raise ConfigError("cluster.ports", text, "must be low-high, such as 20000-20999")
    low, high = map(int, parts.groups())
    if not 0 < low <= high <= _HIGHEST_PORT:
        raise ConfigError(
            "cluster.ports", text, f"must be two ports between 1 and {_HIGHEST_PORT}, the lower one first"
        )
    return range(low, high + 1)

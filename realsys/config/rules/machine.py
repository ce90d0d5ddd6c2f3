"""CPU cores, memory and GPUs of this machine, found without torch."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.config.devices.device_plan import NodeDevices
from realsys.config.rules.free_memory import free_host_bytes, gpu_bytes
from realsys.config.sections.schema_cluster import ClusterConfig
from realsys.errors import ConfigError

_GIB = 1 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def own_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the ids of the GPUs that this process may use. Raises ConfigError."""
    return visible_gpus(environment.get(VISIBLE), _present_gpus())


def visible_to(gpus: Sequence[int], ids: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that may use ``gpus``, indexes into ``ids``; without indexes it sees none."""
    return {VISIBLE: ",".join(ids[gpu] for gpu in gpus)} if ids else {}


def _present_gpus() -> int:
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


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


def _torch_has_cuda() -> bool:
    """Return True if the installed torch is a CUDA build. Reads its version file, since importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b.*=\s*['\"]", version.read_text("utf-8"), re.MULTILINE) is not None

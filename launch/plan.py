"""Plans the processes of a trial: Config -> list[ProcessSpec]. Pure: nothing is read, written or started here.

name_store x 1 (etcd, with cluster.name_store.start), gserver_manager x 1, generation_server x (data part of inference),
model_worker x (world size of training), rollout_worker x rollout.workers, master_worker x 1
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import realsys
from realsys.cluster.topology import ModelShardID, place
from realsys.config.allocation import ACTOR, Allocation, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.doors import BACKEND
from realsys.config.paths import TrialPaths
from realsys.config.rules.backend_rules import backend_rules
from realsys.config.rules.machine import Machine
from realsys.config.schema import Config

Kind = Literal["name_store", "gserver_manager", "generation_server", "model_worker", "rollout_worker", "master_worker"]
OnDeath = Literal["restart", "restart_training", "end"]

NAME_STORE: Kind = "name_store"
#: If one of them dies, all of them restart: the ranks of a mesh need each other and the master.
TRAINING: frozenset[Kind] = frozenset({"model_worker", "master_worker"})
_IN_WORDS: dict[OnDeath, str] = {
    "restart": "restarted",
    "restart_training": "the trainer restarts",
    "end": "ends the run",
}

#: this realsys, also when it runs from a checkout that is not installed
_SOURCE_ROOT = str(Path(realsys.__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` is laid over the launcher's own environment."""

    kind: Kind
    index: int
    argv: tuple[str, ...]
    log: Path
    on_death: OnDeath
    holds: str = ""  # model shards
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.index}"

    @property
    def on_training_side(self) -> bool:
        return self.kind in TRAINING


def plan(config: Config, paths: TrialPaths, machine: Machine, run_id: str, python_path: str = "") -> list[ProcessSpec]:
    """List the processes of one trial, in the order they are started.

    ``run_id`` is written into every environment (REALSYS_RUN_ID), to find the processes of a run. ``python_path`` is
    the user's PYTHONPATH, for the modules that import strings name; the root of this realsys is put in front of it.
    """
    allocation = parse_allocation(config.allocation)
    devices = _Devices.share(config, allocation, machine)
    common = {
        "PYTHONPATH": os.pathsep.join(filter(None, [_SOURCE_ROOT, python_path])),
        "REALSYS_RUN_ID": run_id,
    }

    def spec(kind: Kind, index: int, devices: str | None, threads: int = 1, holds: str = "") -> ProcessSpec:
        env = {**common, **_environment(threads, devices)}
        # -P: a folder named `realsys` in the user's directory must not be imported instead of this one.
        argv = (sys.executable, "-P", "-m", f"realsys.workers.{kind}", "--trial-dir", str(paths.root))
        log = paths.logs / f"{kind}-{index}.log"
        return ProcessSpec(kind, index, (*argv, "--index", str(index)), log, _on_death(kind, config), holds, env)

    specs = [spec(NAME_STORE, 0, devices.none)] if config.cluster.name_store.start else []
    specs.append(spec("gserver_manager", 0, devices.none))
    for index in range(allocation.inference.data):
        specs.append(spec("generation_server", index, devices.of_server(index), config.generation.threads))
    for rank, shards in enumerate(_shards(config, allocation)):
        specs.append(spec("model_worker", rank, devices.of_rank(rank), config.train.threads, ", ".join(shards)))
    for index in range(config.rollout.workers):
        specs.append(spec("rollout_worker", index, devices.none))
    specs.append(spec("master_worker", 0, devices.none))
    return specs


def _on_death(kind: Kind, config: Config) -> OnDeath:
    if kind not in TRAINING:
        return "restart"
    return "end" if config.recover == "off" else "restart_training"


def _shards(config: Config, allocation: Allocation) -> list[list[str]]:
    """Return the model shards of each ModelWorker, named as in the routing table: ``actor@d0t0p0``."""
    shards: list[list[str]] = [[] for _ in range(allocation.workers)]
    for role, mesh in place(allocation, dict.fromkeys([ACTOR, *dataflow_of(config).roles])).items():
        for rank, worker in enumerate(mesh.workers):
            shards[worker].append(str(ModelShardID(role, *mesh.coordinates(rank))))
    return shards


def _environment(threads: int, devices: str | None) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # the tokenizer's thread pool does not survive the fork of a verifier
    }
    return env if devices is None else {**env, "CUDA_VISIBLE_DEVICES": devices}


@dataclass(frozen=True, slots=True)
class _Devices:
    """Assignment of GPUs: one to every training rank (NCCL refuses to share one), the others to servers.

    If no GPU is left, the servers share the training devices, so that one GPU is enough for a whole run.
    """

    ranks: tuple[str, ...]
    servers: tuple[str, ...]
    per_server: int
    any_gpu: bool

    @classmethod
    def share(cls, config: Config, allocation: Allocation, machine: Machine) -> _Devices:
        world, width = allocation.workers, allocation.inference.tensor
        ranks = machine.trainer_gpus[:world]
        with BACKEND.guard(config.generation.backend, "gpus raised"):
            visible = tuple(backend_rules(config).gpus(machine))
        free = tuple(gpu for gpu in visible if gpu not in ranks)
        servers = free if len(free) >= width else visible
        return cls(ranks, servers, width, bool(machine.gpus))

    @property
    def none(self) -> str | None:
        return "" if self.any_gpu else None

    def of_rank(self, rank: int) -> str | None:
        return self.ranks[rank] if self.ranks else self.none

    def of_server(self, index: int) -> str | None:
        if not self.servers:
            return self.none
        slots = max(1, len(self.servers) // self.per_server)
        first = index % slots * self.per_server
        return ",".join(self.servers[first : first + self.per_server])


def as_rows(specs: Sequence[ProcessSpec]) -> list[tuple[str, str, str, str, str]]:
    """Return (process, holds, threads, devices, when it dies) of each process, for a table."""
    return [
        (
            spec.name,
            spec.holds,
            spec.env["OMP_NUM_THREADS"],
            spec.env.get("CUDA_VISIBLE_DEVICES", "") or "cpu",
            _IN_WORDS[spec.on_death],
        )
        for spec in specs
    ]


def as_commands(specs: Sequence[ProcessSpec]) -> list[str]:
    """Return shell commands that start the processes, after one that exports what all of their environments share."""
    shared = set.intersection(*(set(spec.env.items()) for spec in specs))
    commands = [shlex.join(["export", *(f"{name}={value}" for name, value in sorted(shared))])]
    for spec in specs:
        own = [f"{name}={value}" for name, value in spec.env.items() if (name, value) not in shared]
        commands.append(shlex.join([*(["env"] if own else []), *own, *spec.argv]))
    return commands

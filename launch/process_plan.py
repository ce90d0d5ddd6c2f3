"""Plans the processes of a trial: Config -> list[ProcessSpec]. Pure: nothing is read, written or started here.

    config, nodes ──seats_of──> seats ──plan──> ProcessSpecs ──> orders to their nodes (realsys.launch.nodes)

name_store x 1 (etcd, with cluster.name_store.start), gserver_manager x 1, generation_server x (data part of inference),
model_worker x (world size of training), reward_service x rollout.reward.services, rollout_worker x rollout.workers,
master_worker x 1

With evaluate_only: evaluator x 1 in the place of model_workers and master_worker. An allocation without servers has
gserver_manager, model_workers and master_worker alone.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from realsys.cluster.names.connect import is_elsewhere
from realsys.cluster.process import INIT_ADDRESS, NODE_RANK, NODES, RUN_ID, STORE_ADDRESS, own_python_path
from realsys.cluster.topology import ModelShardID, place
from realsys.config.allocation import ACTOR, Allocation, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.device_plan import EVALUATOR, RANK, SERVER, Kind, Needs, Seat
from realsys.config.machine import VISIBLE, Machine, visible_to
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.nodes.orders import LOCAL, NodePort

OnDeath = Literal["restart", "restart_training", "end"]

NAME_STORE: Kind = "name_store"
#: The run ends when one of these has done its work.
LEADERS: frozenset[Kind] = frozenset({"master_worker", EVALUATOR})
#: If one of them dies, all of them restart: the ranks of a mesh need each other and the master.
TRAINING: frozenset[Kind] = frozenset({"model_worker", "master_worker"})
_IN_WORDS: dict[OnDeath, str] = {
    "restart": "restarted",
    "restart_training": "the trainer restarts",
    "end": "ends the run",
}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` is laid over the environment of its node.

    node, gpus, cpus, memory  its seat; ``gpus`` are indexes on the node, memory is that of the host in bytes, before a
                              model is loaded
    addresses  variables of its environment that hold a node's ``host:port``, known when a machine has joined
    node_rank, nodes, init_address  of a server that spans nodes: one spec per node
    """

    kind: Kind
    index: int
    argv: tuple[str, ...]
    log: Path
    on_death: OnDeath
    holds: str = ""  # model shards
    env: dict[str, str] = field(default_factory=dict)
    node: str = LOCAL
    gpus: tuple[int, ...] = ()
    cpus: int = 1
    memory: int = 0
    node_rank: int = 0
    nodes: int = 1
    init_address: str = ""
    addresses: dict[str, NodePort] = field(default_factory=dict)

    @property
    def name(self) -> str:
        part = f".{self.node_rank}" if self.node_rank else ""
        return f"{self.kind}/{self.index}{part}"

    @property
    def on_training_side(self) -> bool:
        return self.kind in TRAINING


def plan(
    config: Config, paths: TrialPaths, seats: Sequence[Seat], run_id: str, python_path: str = ""
) -> list[ProcessSpec]:
    """Return the processes of one trial, one per seat, in the order of the seats.

    ``run_id`` is written into every environment (REALSYS_RUN_ID), to find the processes of a run. ``python_path`` is
    the user's PYTHONPATH, for the modules that import strings name; the root of this realsys is put in front of it.
    """
    common = {
        "PYTHONPATH": own_python_path(python_path),
        RUN_ID: run_id,
    }
    shards = _shards(config, parse_allocation(config.allocation))
    threads = {SERVER: config.cluster.threads, RANK: config.cluster.threads}
    store = _own_name_store(config, seats)

    def spec(seat: Seat) -> ProcessSpec:
        # -P: a folder named `realsys` in the user's directory must not be imported instead of this one.
        module: str = seat.kind
        index = seat.index
        if seat.node_rank:
            module, index = "generation_part", index * seat.nodes + seat.node_rank
        argv = (sys.executable, "-P", "-m", f"realsys.workers.{module}", "--trial-dir", str(paths.root))
        part = f".{seat.node_rank}" if seat.node_rank else ""
        return ProcessSpec(
            seat.kind,
            seat.index,
            (*argv, "--index", str(index)),
            paths.logs / f"{seat.kind}-{seat.index}{part}.log",
            _on_death(seat.kind, config),
            ", ".join(shards[seat.index]) if seat.kind == RANK else "",
            {**common, **_environment(threads.get(seat.kind, 1)), **_part_of_server(seat)},
            seat.node,
            seat.gpus,
            seat.cpus,
            seat.memory,
            seat.node_rank,
            seat.nodes,
            seat.init_address,
            {**store, **_meeting(seat)},
        )

    return [spec(seat) for seat in seats]


def _own_name_store(config: Config, seats: Sequence[Seat]) -> dict[str, NodePort]:
    """Return where the own etcd of a trial on other machines listens: on the node that has it, at the given port."""
    if not is_elsewhere(config):
        return {}
    _, _, port = config.cluster.name_store.address.rpartition(":")
    [node] = [seat.node for seat in seats if seat.kind == NAME_STORE]
    return {STORE_ADDRESS: NodePort(node, int(port))}


def _meeting(seat: Seat) -> dict[str, NodePort]:
    if not seat.init_address:
        return {}
    node, _, port = seat.init_address.rpartition(":")
    return {INIT_ADDRESS: NodePort(node, int(port))}


def _part_of_server(seat: Seat) -> dict[str, str]:
    return {NODE_RANK: str(seat.node_rank), NODES: str(seat.nodes)} if seat.nodes > 1 else {}


def needs_of(specs: Sequence[ProcessSpec], gpu_memory: int = 0, rank_gpu: int = 0) -> dict[str, Needs]:
    """Return node -> what its processes take, in the order of the nodes' names.

    gpu_memory  bytes of each GPU
    rank_gpu    bytes of the smallest GPU that can have a training rank
    """
    needs = {}
    for name in sorted({spec.node for spec in specs}, key=_by_number):
        there = [spec for spec in specs if spec.node == name]
        trains = any(spec.kind == RANK and spec.gpus for spec in there)
        needs[name] = replace(Needs.of(there, gpu_memory), rank_gpu=rank_gpu if trains else 0)
    return needs


def _by_number(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def agent_command(paths: TrialPaths, python_path: str = "") -> list[str]:
    """Return the command of an agent, without ``--node NAME``, for any machine that sees the files of this realsys."""
    path = own_python_path(python_path)
    argv = [sys.executable, "-P", "-m", "realsys.launch.cli", "node-agent", "--trial-dir", str(paths.root)]
    return ["env", f"PYTHONPATH={path}", *argv]


def on_this_machine(specs: Sequence[ProcessSpec], machine: Machine) -> list[ProcessSpec]:
    """Return the specs as the executor of ``machine`` starts them, to show them."""
    return [replace(spec, env={**spec.env, **visible_to(spec.gpus, machine.gpus)}) for spec in specs]


def _on_death(kind: Kind, config: Config) -> OnDeath:
    if kind == EVALUATOR:
        return "end"
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


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # the tokenizer's thread pool does not survive the fork of a verifier
    }


def as_rows(specs: Sequence[ProcessSpec]) -> list[tuple[str, str, str, str, str]]:
    """Return (process, holds, threads, devices, when it dies) of each process, for a table."""
    return [
        (
            spec.name,
            spec.holds,
            spec.env["OMP_NUM_THREADS"],
            spec.env.get(VISIBLE, "") or "cpu",
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

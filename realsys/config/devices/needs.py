"""Blocks and nodes of a trial, from its configuration: the input of the device plan. Reads no file."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import get_args

from realsys.config.allocation import ACTOR, Allocation, parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.devices.device_plan import (
    EVALUATOR,
    FIRST_INIT_PORT,
    RANK,
    SERVER,
    Block,
    Kind,
    NodeDevices,
    Seat,
    place,
)
from realsys.config.doors import BACKEND
from realsys.config.memory.device_memory import GIB
from realsys.config.memory.hosts import OnHost
from realsys.config.rules.backend_rules import BackendRules, backend_rules
from realsys.config.rules.machine import Machine
from realsys.config.rules.ports import port_range
from realsys.config.schema import Config
from realsys.errors import ConfigError


def nodes_of(config: Config, machine: Machine) -> list[NodeDevices]:
    """Return the nodes that the configuration describes; without them, ``machine`` alone. Raises ConfigError."""
    cluster = config.cluster
    if not cluster.nodes:
        for field in ("gpus_per_node", "cpus_per_node", "memory_gb_per_node", "cpu_nodes"):
            if value := getattr(cluster, field):
                raise ConfigError(f"cluster.{field}", value, "describes other machines: set cluster.nodes too")
        return [machine.node()]
    light = cluster.cpu_nodes
    if light >= cluster.nodes:
        problem = f"are among the nodes, and leave none for trainers and servers: cluster.nodes is {cluster.nodes}"
        raise ConfigError("cluster.cpu_nodes", light, problem)
    memory, light_memory = int(cluster.memory_gb_per_node * GIB), int(cluster.memory_gb_per_cpu_node * GIB)
    nodes = [NodeDevices(f"node{n}", cluster.cpus_per_cpu_node, light_memory, 0, light=True) for n in range(light)]
    heavy = range(light, cluster.nodes)
    return nodes + [NodeDevices(f"node{n}", cluster.cpus_per_node, memory, cluster.gpus_per_node) for n in heavy]


def gpus_of_torch(config: Config, machine: Machine) -> int:
    """Return on how many GPUs the nodes can train. The torch of other machines is taken to be a CUDA build."""
    cluster = config.cluster
    heavy = cluster.nodes - cluster.cpu_nodes
    return heavy * cluster.gpus_per_node if cluster.nodes else len(machine.trainer_gpus)


def servers_use_gpus(config: Config, machine: Machine, backend: BackendRules) -> bool:
    """Return True if servers get GPUs: those of this torch, or any if the engine brings another torch."""
    return gpus_of_torch(config, machine) > 0 or (not config.cluster.nodes and backend.own_torch and bool(machine.gpus))


def seats_of(
    config: Config, machine: Machine, nodes: Sequence[NodeDevices], kinds: Collection[Kind] | None = None
) -> list[Seat]:
    """Place the processes of a trial, in the order in which they start. Raises ConfigError.

    ``kinds``: place only these; None: all.
    """
    blocks = [block for block in _blocks(config, machine, nodes[-1]) if kinds is None or block.kind in kinds]
    blocks.sort(key=lambda block: (block.kind != RANK, block.kind != SERVER, not block.on_first))
    seats = place(nodes, blocks, config.allocation, share=config.cluster.share_gpus)
    order = get_args(Kind)
    return sorted(seats, key=lambda seat: (order.index(seat.kind), seat.index, seat.node_rank))


def _blocks(config: Config, machine: Machine, node: NodeDevices) -> list[Block]:
    allocation, light = parse_allocation(config.allocation), OnHost(0, 0, 1).processes
    single: list[Kind] = ["gserver_manager", EVALUATOR if config.evaluate_only else "master_worker"]
    if config.cluster.name_store.start:
        single.append("name_store")
    blocks = [Block(kind, range(1), 0, 1, light, on_first=True) for kind in single]
    on_gpus = gpus_of_torch(config, machine) > 0
    if not config.evaluate_only:
        blocks += [
            Block(RANK, ranks, int(on_gpus), config.train.threads, OnHost(1, 0, 0, ranks_on_gpu=on_gpus).processes)
            for ranks in tensor_groups(allocation, [ACTOR, *dataflow_of(config).roles])
        ]
    backend = backend_rules(config)
    server = _server(config, allocation, backend, node, servers_use_gpus(config, machine, backend))
    servers, ports = allocation.inference.data, port_range(config.cluster.ports)
    init = max(ports[0], ports[-1] + 1 - servers) if ports else FIRST_INIT_PORT
    blocks += [Block(SERVER, range(n, n + 1), *server, init=init) for n in range(servers)]
    workers, reward = config.rollout.workers, config.rollout.reward
    judging = 1 + reward.processes
    threads = 1 if reward.services else judging
    blocks += [Block("reward_service", range(n, n + 1), 0, judging, light) for n in range(reward.services)]
    return blocks + [Block("rollout_worker", range(n, n + 1), 0, threads, light) for n in range(workers)]


def _server(
    config: Config, allocation: Allocation, backend: BackendRules, node: NodeDevices, uses_gpus: bool
) -> tuple[int, int, int, int]:
    """Return GPUs, cores, bytes of host memory and pipeline stages of one server."""
    with BACKEND.guard(config.generation.backend, "sizes or memory_bytes raised"):
        sizes = backend.sizes(allocation)
        memory = OnHost(0, 1, 0, int(backend.memory_bytes(node)), servers_on_gpu=uses_gpus).processes
    gpus = sizes.gpus if uses_gpus else 0
    return gpus, config.generation.threads, memory, 1 if sizes.data > 1 else sizes.pipeline


def tensor_groups(allocation: Allocation, roles: Collection[str]) -> list[range]:
    """Return the ranks that must share a node, as ascending ranges: the tensor-parallel groups of all roles.

    Groups of different roles that overlap are joined.
    """
    starts = set(range(allocation.workers))
    for role in roles:
        placement = allocation.placement(role)
        width = placement.layout.tensor
        # Ranks of a group follow each other: rank = pp * (DP * TP) + dp * TP + tp.
        for first in range(placement.first, placement.first + placement.layout.world_size, width):
            starts -= set(range(first + 1, first + width))
    bounds = [*sorted(starts), allocation.workers]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]

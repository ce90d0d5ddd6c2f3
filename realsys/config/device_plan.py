"""Places the processes of a trial on nodes and GPUs. Pure: the nodes are described, not asked; no file is read.

    configuration ──┬─> blocks ──┬──place──> seats, or ConfigError with the numbers
    machine ────────┴─> nodes ───┘

one-owner    a GPU has one owner, unless sharing is requested; then a server goes where the fewest others are
in-turn      a server that the allocation lends devices of workers (`|`) is on their GPUs, and on no others
one-rank     two training ranks never share a GPU: NCCL refuses it
whole-group  a block has neighbouring GPUs of one node: the ranks of a tensor-parallel group or under one server, or the
             stages of a server
all-placed   every process has a seat, or the plan is refused

Blocks are placed in their order, each on the first node with room: training ranks fill the nodes from the first one on,
servers get the rest. A block without GPUs goes to the node with the least work per CPU core. If there are light nodes,
blocks other than ranks and servers go there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from realsys.config.allocation import ACTOR, Allocation, parse_allocation
from realsys.config.backend_rules import BackendRules, backend_rules
from realsys.config.dataflow import dataflow_of
from realsys.config.device_memory import GIB, OnHost
from realsys.config.doors import BACKEND
from realsys.config.machine import Machine, NodeDevices, port_range
from realsys.config.schema import Config
from realsys.errors import ConfigError

Kind = Literal[
    "name_store",
    "gserver_manager",
    "generation_server",
    "model_worker",
    "reward_service",
    "rollout_worker",
    "master_worker",
    "evaluator",
]
RANK: Kind = "model_worker"
SERVER: Kind = "generation_server"
EVALUATOR: Kind = "evaluator"
FIRST_INIT_PORT = 25000
_OF_NOMINAL = 0.98  # a GPU that is sold with 80 GB reports 79.6 GiB
_FEWEST_PROCESSES, _PROCESSES_PER_CORE = 32, 8  # bound on the processes of a node


@dataclass(frozen=True, slots=True)
class Block:
    """Processes that must sit on one node, next to each other; or one server that may span several nodes.

    indexes  numbers of the processes within their kind
    gpus     GPUs of each process
    cpus     cores of each process
    memory   bytes of host memory of each process, before it loads a model
    parts    equal parts of a server that may sit on different nodes: its pipeline stages
    on_first the block belongs on the first node
    init     port at which the nodes of server 0 find each other, if it spans nodes; the next server has the next port
    workers  training ranks whose GPUs a server uses in turn with them
    """

    kind: Kind
    indexes: range
    gpus: int
    cpus: int
    memory: int
    parts: int = 1
    on_first: bool = False
    init: int = FIRST_INIT_PORT
    workers: range = range(0)

    @property
    def name(self) -> str:
        first, last = self.indexes[0], self.indexes[-1]
        return f"{self.kind}/{first}" if first == last else f"{self.kind}/{first}-{last}"


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one process. ``gpus`` are indexes on the node.

    A server that spans nodes has a seat on each: ``node_rank`` counts them, and they meet at ``init_address``.
    """

    kind: Kind
    index: int
    node: str
    gpus: tuple[int, ...]
    cpus: int
    memory: int
    node_rank: int = 0
    nodes: int = 1
    init_address: str = ""


# ---- nodes and blocks of a configuration


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


def _blocks(config: Config, machine: Machine, node: NodeDevices) -> list[Block]:
    allocation, light = parse_allocation(config.allocation), OnHost(0, 0, 1).processes
    single: list[Kind] = ["gserver_manager", EVALUATOR if config.evaluate_only else "master_worker"]
    if config.cluster.name_store.start:
        single.append("name_store")
    blocks = [Block(kind, range(1), 0, 1, light, on_first=True) for kind in single]
    on_gpus = gpus_of_torch(config, machine) > 0
    if not config.evaluate_only:
        blocks += [
            Block(RANK, ranks, int(on_gpus), config.cluster.threads, OnHost(1, 0, 0, ranks_on_gpu=on_gpus).processes)
            for ranks in tensor_groups(allocation, [ACTOR, *dataflow_of(config).roles])
        ]
    servers, ports = allocation.inference.data, port_range(config.cluster.ports)
    if not servers:
        return blocks
    backend = backend_rules(config)
    server = _server(config, allocation, backend, node, servers_use_gpus(config, machine, backend))
    init = max(ports[0], ports[-1] + 1 - servers) if ports else FIRST_INIT_PORT
    lending = _lending(allocation) if on_gpus and not config.evaluate_only else {}
    blocks += [
        Block(SERVER, range(n, n + 1), *server, init=init, workers=lending.get(n, range(0))) for n in range(servers)
    ]
    if config.is_service:
        return blocks
    workers, reward = config.rollout.workers, config.rollout.reward
    judging = 1 + reward.processes
    threads = 1 if reward.services else judging
    blocks += [Block("reward_service", range(n, n + 1), 0, judging, light) for n in range(reward.services)]
    return blocks + [Block("rollout_worker", range(n, n + 1), 0, threads, light) for n in range(workers)]


def _lending(allocation: Allocation) -> dict[int, range]:
    """Return the workers on whose devices each server is that uses them in turn."""
    width, first = allocation.inference.tensor, allocation.inference.data - allocation.lent
    starts = enumerate(range(allocation.lending.start, allocation.lending.stop, width), first)
    return {server: range(start, start + width) for server, start in starts}


def _server(
    config: Config, allocation: Allocation, backend: BackendRules, node: NodeDevices, uses_gpus: bool
) -> tuple[int, int, int, int]:
    """Return GPUs, cores, bytes of host memory and pipeline stages of one server."""
    with BACKEND.guard(config.generation.backend, "sizes or memory_bytes raised"):
        sizes = backend.sizes(allocation)
        memory = OnHost(0, 1, 0, int(backend.memory_bytes(node)), servers_on_gpu=uses_gpus).processes
    gpus = sizes.gpus if uses_gpus else 0
    return gpus, config.cluster.threads, memory, 1 if sizes.data > 1 else sizes.pipeline


def tensor_groups(allocation: Allocation, roles: Collection[str]) -> list[range]:
    """Return the ranks that must share a node, as ascending ranges: the tensor-parallel groups of all roles.

    Groups of different roles that overlap are joined, and those under one server.
    """
    starts = set(range(allocation.workers))
    for workers in _lending(allocation).values():
        starts -= set(workers[1:])
    for role in roles:
        placement = allocation.placement(role)
        width = placement.layout.tensor
        # Ranks of a group follow each other: rank = pp * (DP * TP) + dp * TP + tp.
        for first in range(placement.first, placement.first + placement.layout.world_size, width):
            starts -= set(range(first + 1, first + width))
    bounds = [*sorted(starts), allocation.workers]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


# ---- the plan


def place(nodes: Sequence[NodeDevices], blocks: Sequence[Block], allocation: str, *, share: bool = False) -> list[Seat]:
    """Return a seat for every process, in the order of the blocks.

    ``share``: servers may use GPUs that have owners. ``allocation`` is the field's text, for messages.
    Raises ConfigError.
    """
    if twice := [name for name, count in Counter(node.name for node in nodes).items() if count > 1]:
        raise ConfigError("cluster.nodes", len(nodes), f"node {twice[0]} is listed twice: list each node once")
    used = [_Used(node, [0] * node.gpus) for node in nodes]
    try:
        _check_sum(used, blocks, share)
        seats = [seat for block in blocks for seat in _place_block(block, used, share)]
        for each in used:
            if problem := Needs.of(each.seats).problem(each.node):
                raise _Refused(f"{problem} on {each.node.name}")
    except _Refused as refused:
        raise ConfigError("allocation", allocation, str(refused)) from None
    return seats


class _Refused(Exception):
    """A plan that does not fit; the text has the numbers."""


def _check_sum(used: Sequence[_Used], blocks: Sequence[Block], share: bool) -> None:
    """Refuse a plan that needs more GPUs than there are."""
    there = sum(each.node.gpus for each in used)
    for_ranks = sum(len(block.indexes) * block.gpus for block in blocks if block.kind == RANK)
    for_servers = sum(block.gpus for block in blocks if block.kind == SERVER and not block.workers)
    if for_ranks > there:
        raise _Refused(f"{for_ranks} training ranks need a GPU each, and there are {there}: lower the training part")
    if for_ranks + for_servers > there and not share:
        parts = f"{for_ranks} for training ranks, {for_servers} for servers"
        problem = f"{for_ranks + for_servers} GPUs are needed ({parts}), and there are {there}"
        remedy = "join server and ranks with | to use the same GPUs in turn, or share them with cluster.share_gpus=true"
        raise _Refused(f"{problem}: lower a part, {remedy}")


def _place_block(block: Block, used: Sequence[_Used], share: bool) -> list[Seat]:
    # if some nodes are light, these are for all but ranks and servers
    light = block.kind not in (RANK, SERVER)
    used = [each for each in used if each.node.light == light] or used
    if not block.gpus:
        target = used[0] if block.on_first else min(used, key=lambda each: each.load)
        return [target.sit(block, index, ()) for index in block.indexes]
    if block.workers:
        for each in used:
            under = [seat for seat in each.seats if seat.kind == RANK and seat.index in block.workers]
            if under:
                return [each.sit(block, block.indexes[0], tuple(seat.gpus[0] for seat in under))]
    if block.kind == SERVER:
        # the fewest nodes that divide its parts, with the same number of GPUs on each
        [index] = block.indexes
        widest = max(each.node.gpus for each in used)
        counts = [count for count in range(1, block.parts + 1) if block.parts % count == 0]
        count = next((count for count in counts if block.gpus // count <= widest), counts[-1])
        width = block.gpus // count
        found = _find(block.name, width, count, used, share=share)
        address = f"{found[0][0].node.name}:{block.init + index}" if count > 1 else ""
        return [
            target.sit(block, index, tuple(range(first, first + width)), (rank, count, address))
            for rank, (target, first) in enumerate(found)
        ]
    [(target, first)] = _find(block.name, len(block.indexes), 1, used, share=False)
    return [target.sit(block, index, (first + number,)) for number, index in enumerate(block.indexes)]


def _find(name: str, width: int, count: int, used: Sequence[_Used], *, share: bool) -> list[tuple[_Used, int]]:
    """Return ``count`` nodes, and the first of ``width`` neighbouring GPUs on each: those with the fewest owners."""
    wide = [(each, each.window(width)) for each in used if each.node.gpus >= width]
    widest = max(each.node.gpus for each in used)
    room = [(each, window) for each, window in wide if share or not window[0]]
    if len(room) >= count:
        best = sorted(room, key=lambda pair: pair[1][:2])[:count]
        return [(each, first) for each, (_, _, first) in best]
    nodes = "one node" if count == 1 else f"each of {count} nodes"
    if len(wide) < count:
        problem = f"{name} needs {width} GPUs of {nodes}, and {len(wide)} of {len(used)} nodes have that many"
        raise _Refused(f"{problem} (the largest has {widest}): lower its parallel sizes")
    free = max(each.owners.count(0) for each in used)
    problem = f"{name} needs {width} free GPUs of {nodes}, and the freest node has {free}"
    raise _Refused(f"{problem} of {widest}: choose parallel sizes that divide {widest}")


@dataclass(slots=True)
class _Used:
    """A node while processes are placed on it. ``owners`` has the number of owners of each GPU."""

    node: NodeDevices
    owners: list[int]
    seats: list[Seat] = field(default_factory=list)

    @property
    def load(self) -> float:
        return sum(seat.cpus for seat in self.seats) / (self.node.cpus or 1)

    def window(self, width: int) -> tuple[int, int, int]:
        """Return (most owners of one GPU, sum of owners, first GPU) of the ``width`` neighbours with the fewest."""
        return min(
            (max(self.owners[first : first + width]), sum(self.owners[first : first + width]), first)
            for first in range(len(self.owners) - width + 1)
        )

    def sit(self, block: Block, index: int, gpus: tuple[int, ...], span: tuple[int, int, str] = (0, 1, "")) -> Seat:
        """Take ``gpus`` for a process. ``span``: node rank, number of nodes, init address."""
        seat = Seat(block.kind, index, self.node.name, gpus, block.cpus, block.memory, *span)
        for gpu in gpus:
            self.owners[gpu] += 1
        self.seats.append(seat)
        return seat


# ---- what the processes of a node need


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of the processes of a node: their number, GPUs and bytes of host memory.

    gpu_memory  bytes of each GPU for which they were planned, 0: any
    rank_gpu    bytes of the smallest GPU that can have one of its training ranks, 0: any
    """

    processes: int
    gpus: int
    memory: int
    gpu_memory: int = 0
    rank_gpu: int = 0

    @classmethod
    def of(cls, seats: Iterable[NeedsRoom], gpu_memory: int = 0) -> Needs:
        """Return the needs of the processes on one node. ``gpu_memory``: bytes of a GPU for which they were planned."""
        there = list(seats)
        gpus = 1 + max((gpu for seat in there for gpu in seat.gpus), default=-1)
        return cls(len(there), gpus, sum(seat.memory for seat in there), gpu_memory if gpus else 0)

    def problem(self, node: NodeDevices) -> str:
        """Return why ``node`` cannot hold the processes; "" if it can."""
        most = max(_FEWEST_PROCESSES, _PROCESSES_PER_CORE * node.cpus)
        if self.gpus > node.gpus:
            return f"its processes need {self.gpus} GPUs, {node.gpus} are there"
        if node.cpus and self.processes > most:
            return f"{self.processes} processes are too many for {node.cpus} CPU cores; at most {most}"
        if node.memory and self.memory > node.memory:
            return f"its processes need about {self.memory / GIB:.1f} GiB, {node.memory / GIB:.1f} GiB are free"
        if node.gpu_memory and _OF_NOMINAL * self.gpu_memory > node.gpu_memory:
            planned, there = self.gpu_memory / GIB, node.gpu_memory / GIB
            return f"its GPUs have {there:.1f} GiB, and the plan is for cluster.gpu_memory_gb={planned:g}"
        if node.gpu_memory and self.rank_gpu > node.gpu_memory:
            needed, there = self.rank_gpu / GIB, node.gpu_memory / GIB
            return f"its GPUs have {there:.1f} GiB, and a training rank needs one of at least {needed:.1f} GiB"
        return ""


class NeedsRoom(Protocol):
    """A process with its place on a node: a Seat, or the process that has it."""

    @property
    def gpus(self) -> tuple[int, ...]: ...

    @property
    def memory(self) -> int: ...


# ---- the plan as text


def owners(seats: Sequence[Seat]) -> Counter[tuple[str, int]]:
    """Count the owners of each GPU: (node, index) -> processes."""
    return Counter((seat.node, gpu) for seat in seats for gpu in seat.gpus)


def as_lines(nodes: Sequence[NodeDevices], seats: Sequence[Seat]) -> list[str]:
    """Return the plan as text: a line for the whole, and one for each node."""
    taken, there = len(owners(seats)), sum(node.gpus for node in nodes)
    lines = [f"nodes: {len(nodes)}, GPUs: {there}, idle: {there - taken}"]
    for node in nodes:
        here = [seat for seat in seats if seat.node == node.name]
        cpu = dict.fromkeys(seat.kind for seat in here if not seat.gpus)
        parts = [_run_as_text(run) for run in _runs([seat for seat in here if seat.gpus])]
        parts += [f"{kind} {','.join(str(s.index) for s in here if s.kind == kind and not s.gpus)}" for kind in cpu]
        lines.append(f"{node.name}: " + ("; ".join(parts) or "idle"))
    return lines


def _runs(seats: Sequence[Seat]) -> list[list[Seat]]:
    """Group seats of one GPU each that continue each other: the next process of the kind, on the next GPU."""
    runs: list[list[Seat]] = []
    for seat in seats:
        last = runs[-1][-1] if runs else seat
        after = (last.kind, last.index + 1, (last.gpus[0] + 1,))
        if len(last.gpus) == 1 and after == (seat.kind, seat.index, seat.gpus):
            runs[-1].append(seat)
        else:
            runs.append([seat])
    return runs


def _run_as_text(run: Sequence[Seat]) -> str:
    first, last = run[0], run[-1]
    span = f" (node {first.node_rank} of {first.nodes}, init {first.init_address})" if first.nodes > 1 else ""
    indexes, gpus = (first.index, last.index), (first.gpus[0], last.gpus[-1])
    return f"{first.kind} {_span(*indexes)} on gpu {_span(*gpus)}{span}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"

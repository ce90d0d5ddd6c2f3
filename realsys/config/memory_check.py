"""Refuses a trial that does not fit into the memory of its devices or of its host, with the cheapest remedy.

One mechanism for both: without GPUs the "devices" are parts of the host's memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from realsys.config.allocation import Allocation, has_agents, parse_allocation
from realsys.config.backend_rules import GPU_SHARE, BackendRules, sizes_of
from realsys.config.dataflow import Dataflow, dataflow_of
from realsys.config.device_memory import (
    GIB,
    MOST_ADAPTERS,
    DeviceUse,
    HostUse,
    OnHost,
    cache_bytes,
    host_use,
    rank_uses,
    server_use,
    usable_bytes,
)
from realsys.config.device_plan import RANK, SERVER, Seat, gpus_of_torch, nodes_of, owners, seats_of, servers_use_gpus
from realsys.config.machine import Machine
from realsys.config.memory_remedies import Remedy, cheapest_host_remedy, cheapest_remedy, ranks_fit, smallest_training
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence, model_of
from realsys.errors import ConfigError

_NAMES = {
    "others": "other roles",
    "step": "optimizer step",
    "cache": "KV cache",
    "head": "output head",
    "layers": "activations",
    "waiting": "the process that waits",
}
#: share of a GPU that is left to kernels and buffers of its processes
_UNPLANNED = 0.1
_LEAST = 0.01  # a share must be positive: the memory check refuses it with the numbers
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "KV cache", "other", "peak", "usable")


# ---- where the processes are


@dataclass(frozen=True, slots=True)
class Place:
    """Resources for the trial.

    gpu_bytes   memory of one GPU, 0 if unknown
    host_bytes  free memory of a host, 0 if unknown
    here        all processes of the trial
    nodes       the processes of each node, if there are several; else ``here`` are on one host
    owners      numbers of training ranks and of servers on the GPUs that servers have
    """

    gpu_bytes: int
    host_bytes: int
    here: OnHost
    nodes: Mapping[str, OnHost] = field(default_factory=dict)
    owners: Collection[tuple[int, int]] = ((0, 1),)

    @property
    def ranks_on_gpu(self) -> bool:
        """True if the trial has training ranks, and they have GPUs."""
        return self.here.ranks > 0 and self.here.ranks_on_gpu

    def fullest_host(self, config: Config) -> tuple[str, HostUse]:
        """Return the node with the greatest use of host memory, "" without nodes, and its use. Raises ModelError."""
        allocation, flow = parse_allocation(config.allocation), dataflow_of(config)
        uses = {
            name: host_use(config, allocation, flow, here) for name, here in (self.nodes or {"": self.here}).items()
        }
        name = max(uses, key=lambda name: uses[name].total)
        return name, uses[name]


def place_of(config: Config, allocation: Allocation, backend: BackendRules, machine: Machine) -> Place:
    """Return the place that the configuration and this machine describe.

    With ``cluster.gpu_memory_gb`` the plan is for GPUs of that size elsewhere, so this machine's memory says nothing.
    """
    cluster, nodes = config.cluster, nodes_of(config, machine)
    elsewhere = cluster.gpu_memory_gb > 0 or cluster.nodes > 0
    gpu_bytes = int(cluster.gpu_memory_gb * GIB) if elsewhere else machine.gpu_bytes
    is_other_host = elsewhere and (cluster.nodes > 0 or not machine.gpus)
    on_gpus = cluster.gpu_memory_gb > 0
    here = OnHost(
        ranks=0 if config.evaluate_only else allocation.workers,
        servers=allocation.inference.data,
        others=2 + (config.rollout.workers + config.rollout.reward.services if has_agents(config) else 0),
        engine=0 if elsewhere or not allocation.inference.data else int(backend.memory_bytes(nodes[-1])),
        ranks_on_gpu=on_gpus or gpus_of_torch(config, machine) > 0,
        servers_on_gpu=on_gpus or servers_use_gpus(config, machine, backend),
    )
    host_bytes = 0 if is_other_host else machine.memory_bytes
    on_nodes: dict[str, OnHost] = {}
    if cluster.nodes:
        host_bytes = int(cluster.memory_gb_per_node * GIB)
        kinds = Counter((seat.node, seat.kind) for seat in seats_of(config, machine, nodes))
        for node in (node for node in nodes if not node.light):  # light nodes load no model: the plan has checked them
            ranks, servers = kinds.pop((node.name, RANK), 0), kinds.pop((node.name, SERVER), 0)
            others = sum(count for (name, _), count in kinds.items() if name == node.name)
            on_nodes[node.name] = replace(here, ranks=ranks, servers=servers, others=others)
    place = Place(gpu_bytes, host_bytes, here, on_nodes)
    shared = owners_beside_servers(seats_of(config, machine, nodes)) if cluster.share_gpus else ()
    return replace(place, owners=shared) if shared else place


# ---- the check


def check_memory(config: Config, place: Place) -> None:
    """Refuse a trial that does not fit. Raises ConfigError or ModelError."""
    allocation, flow = parse_allocation(config.allocation), dataflow_of(config)
    if place.ranks_on_gpu and place.gpu_bytes:
        _check_ranks(config, allocation, flow, place)
    if place.here.servers_on_gpu and place.here.servers and place.gpu_bytes:
        _check_servers(config, allocation, place)
    if place.host_bytes:
        _check_host(config, place)


def _check_ranks(config: Config, allocation: Allocation, flow: Dataflow, place: Place) -> None:
    if ranks_fit(config, place.gpu_bytes):
        return
    usable = usable_bytes(config, place.gpu_bytes, server=False)
    use = max((use for use, _ in rank_uses(config, allocation, flow, on_gpu=True)), key=lambda use: use.total)
    problem = f"{use.owner} needs about {_gib(use.total)} of GPU memory, {_gib(usable)} are usable ({parts_text(use)})"
    remedy = cheapest_remedy(config, lambda changed: ranks_fit(changed, place.gpu_bytes))
    if remedy is None:
        advice = _other_allocation(config, allocation, place)
        raise ConfigError("allocation", config.allocation, f"{problem}: {advice}")
    raise _refusal(config, problem, remedy, largest_rank(remedy.apply(config)))


def _other_allocation(config: Config, allocation: Allocation, place: Place) -> str:
    """Return what to do if no setting is enough: more of the same GPUs for training, or a smaller run."""
    own = allocation.inference.data - allocation.lent
    gpus = allocation.workers + own * sizes_of(config, allocation).gpus
    is_plain = len(allocation.roles) == 1 and allocation.inference.data > 0
    text = smallest_training(config, gpus, place.gpu_bytes) if is_plain else None
    if text is None:
        return "no setting is enough: use more GPUs with a larger m or p, train.lora.rank, or a smaller model"
    return f"no setting is enough for this number of training ranks: set allocation={text}"


def _check_servers(config: Config, allocation: Allocation, place: Place) -> None:
    """Check a server's share of its device: a training rank and other servers may be on it, too."""
    use, usable = server_use(config, allocation, on_gpu=True), usable_bytes(config, place.gpu_bytes, server=True)
    shares = _server_shares(config, place)
    ranks, servers = min(shares, key=lambda pair: shares[pair])
    usable = min(usable, shares[ranks, servers])
    if use.total <= usable:
        return
    others = [f"a training rank with {_gib(largest_rank(config))}"] * ranks
    others += [f"{servers - 1} other server{'s' * (servers > 2)}"] * (servers > 1)
    beside = f" beside {' and '.join(others)}" if others else ""
    problem = f"{use.owner} needs about {_gib(use.total)} of GPU memory{beside}, {_gib(max(0, usable))} are usable"
    problem += f" ({parts_text(use)})"
    if config.generation.backend != "embedded":
        advice = "use more tensor ranks per server (m of the serve part), or shorter sequences"
        raise ConfigError("allocation", config.allocation, f"{problem}: {advice}")
    running = _running_that_fit(config, usable - use.total)
    if running < 1:
        raise ConfigError("generation.backend", "embedded", f"{problem}: use generation=sglang, which splits a model")
    field = "generation.embedded.max_running"
    raise ConfigError(field, config.generation.embedded.max_running, f"{problem}: set {field}={running} at most")


def _server_shares(config: Config, place: Place) -> dict[tuple[int, int], int]:
    """Return the bytes for each server of a GPU, by the numbers of ranks and servers on it."""
    rank, whole = largest_rank(config), usable_bytes(config, place.gpu_bytes, server=False)
    return {(ranks, servers): (whole - ranks * rank) // servers for ranks, servers in place.owners}


def _running_that_fit(config: Config, missing: int) -> int:
    """Return how many sequences the embedded engine may run. ``missing``: bytes that are left, negative."""
    embedded, model = config.generation.embedded, model_of(config)
    row = (embedded.context_length or longest_sequence(config)) * (cache_bytes(config, model) + 16) + 16 * model.vocab
    return embedded.max_running + missing // (row * (1 + MOST_ADAPTERS if config.is_service else 1))


def _check_host(config: Config, place: Place) -> None:
    name, use = place.fullest_host(config)
    if use.total <= place.host_bytes:
        return
    problem = f"{name or 'the run'} needs about {_gib(use.total)} of host memory, {_gib(place.host_bytes)} are free"
    problem += f" ({parts_text(use)})"

    def needs(changed: Config) -> int:
        return place.fullest_host(changed)[1].total

    def fits(changed: Config) -> bool:
        return needs(changed) <= place.host_bytes and _gpus_fit(changed, place)

    remedy = (cheapest_host_remedy if place.ranks_on_gpu else cheapest_remedy)(config, fits)
    if remedy is not None:
        raise _refusal(config, problem, remedy, needs(remedy.apply(config)))
    advice = "use more nodes" if place.nodes else "use a smaller model or fewer ranks and servers"
    raise ConfigError("allocation", config.allocation, f"{problem}: {advice}")


def _gpus_fit(config: Config, place: Place) -> bool:
    """Return True if the GPUs hold the ranks and, if they are shared, the servers. Servers alone are checked before."""
    if not (place.ranks_on_gpu and place.gpu_bytes):
        return True
    if not place.here.servers:
        return ranks_fit(config, place.gpu_bytes)
    use = server_use(config, parse_allocation(config.allocation), on_gpu=True)
    return ranks_fit(config, place.gpu_bytes) and use.total <= min(_server_shares(config, place).values())


def _refusal(config: Config, problem: str, remedy: Remedy, after: int) -> ConfigError:
    name = next(iter(remedy.values))
    value = functools.reduce(operator.getitem, name.split("."), config.model_dump())
    return ConfigError(name, value, f"{problem}: set {remedy}, then it needs {_gib(after)}")


def spare_bytes(config: Config, place: Place) -> int:
    """Return the bytes that each server may take beyond the prediction; 0 if they are unknown. Raises ModelError."""
    if not place.here.servers_on_gpu:
        name, host = place.fullest_host(config)
        servers = (place.nodes[name] if name else place.here).servers
        return max(0, place.host_bytes - host.total) // max(1, servers)
    if not place.gpu_bytes:
        return 0
    use = server_use(config, parse_allocation(config.allocation), on_gpu=True)
    usable = usable_bytes(config, place.gpu_bytes, server=True)
    return max(0, min(usable, *_server_shares(config, place).values()) - use.total)


def running_sequences(config: Config, place: Place) -> int:
    """Return how many running sequences an engine holds that takes all memory for its cache. Raises ModelError.

    They are at all stages of their growth, so each has half of the longest sequence.
    """
    allocation = parse_allocation(config.allocation)
    one = server_use(config, allocation, on_gpu=place.here.servers_on_gpu).cache
    return sizes_of(config, allocation).data * (2 * (one + spare_bytes(config, place)) // one)


def parts_text(use: DeviceUse | HostUse) -> str:
    """Return the parts of a use that are worth naming, largest first."""
    parts = sorted(use.parts().items(), key=lambda part: -part[1])
    shown = [(name, size) for name, size in parts if size >= use.total / 100]
    return ", ".join(f"{_NAMES.get(name, name)} {size / GIB:.1f}" for name, size in shown)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


# ---- share of a GPU's memory that a server may take if other processes have the GPU, too


def server_share(gpus: Iterable[tuple[int, int]], rank_share: float | None) -> float:
    """Return the share of each server, down to two digits: the least of all GPUs that servers have.

    gpus        numbers of training ranks and of servers on these GPUs
    rank_share  predicted share that a rank needs; None: not known, the processes of a GPU split it evenly
    """
    free = 1 - _UNPLANNED
    shares = [
        free / (ranks + servers) if rank_share is None else (free - ranks * rank_share) / servers
        for ranks, servers in gpus
    ]
    return max(_LEAST, math.floor(100 * min(shares) + 1e-9) / 100)


def owners_beside_servers(seats: Sequence[Seat]) -> set[tuple[int, int]]:
    """Return the numbers of training ranks and of servers on the GPUs that servers have."""
    count, served = owners(seats), owners([seat for seat in seats if seat.kind == SERVER])
    return {(count[gpu] - number, number) for gpu, number in served.items()}


def largest_rank(config: Config) -> int:
    """Return the predicted bytes of the training rank that needs most of its GPU. Raises ModelError."""
    uses = rank_uses(config, parse_allocation(config.allocation), dataflow_of(config), on_gpu=True)
    return max(use.total for use, _ in uses)


def smallest_gpu_for_ranks(config: Config) -> int:
    """Return the bytes of the smallest GPU on which each training rank fits. Raises ModelError."""
    return math.ceil(largest_rank(config) / GPU_SHARE)


# ---- predicted memory as lines of text, for `realsys run --dry-run`


def device_lines(config: Config, place: Place) -> list[str]:
    """Return a table with a line for each kind of training rank and of server. Raises ModelError.

    ``other``: other roles, temporaries of the optimizer's step, libraries, also those of a process that waits for its
    turn. A peak is that of the phase that needs most.
    """
    allocation, here = parse_allocation(config.allocation), place.here
    uses = [use for use, _ in rank_uses(config, allocation, dataflow_of(config), on_gpu=here.ranks_on_gpu)]
    servers = [server_use(config, each, on_gpu=here.servers_on_gpu) for each in _alike_servers(allocation)]
    is_large = max(use.total for use in (*uses, *servers)) >= GIB
    unit, name = (GIB, "GiB") if is_large else (1 << 20, "MiB")
    limits = [_usable(config, place, unit, on_gpu=here.ranks_on_gpu, server=False) for _ in uses]
    limits += [_usable(config, place, unit, on_gpu=here.servers_on_gpu, server=True) for _ in servers]
    rows = [_row(use, unit, limit) for use, limit in zip((*uses, *servers), limits, strict=True)]
    return _aligned([(f"device, {name}", *_COLUMNS), *rows])


def _alike_servers(allocation: Allocation) -> list[Allocation]:
    """Return the allocation of the servers with devices of their own, if there are both kinds, and the whole one.

    Nothing without servers.
    """
    if not allocation.inference.data:
        return []
    own, inference = allocation.inference.data - allocation.lent, allocation.inference
    both = allocation.lent and own
    return [*([replace(allocation, inference=replace(inference, data=own), lent=0)] if both else []), allocation]


def turns_line(config: Config, place: Place) -> str:
    """Return which servers use devices in turn with ranks, and where these keep their memory; "" if none does."""
    allocation = parse_allocation(config.allocation)
    if not allocation.lent:
        return ""
    offloaded = place.fullest_host(config)[1].offload
    kept = f"{offloaded / GIB:.1f} GiB of host memory" if place.here.ranks_on_gpu else "files"
    servers, ranks = f"{allocation.lent} of {allocation.inference.data} servers", len(allocation.lending)
    both = f"{servers} and {ranks} of {allocation.workers} training ranks use the same devices in turn"
    return f"{both}; while the servers serve, models and optimizers of the ranks are in {kept}"


def host_line(config: Config, place: Place) -> str:
    """Return the predicted host memory with its parts, in GiB. Raises ModelError."""
    name, use = place.fullest_host(config)
    free = f", {place.host_bytes / GIB:.1f} are free" if place.host_bytes else ""
    where = f" on {name}, the fullest node" if name else ""
    return f"about {use.total / GIB:.1f} GiB{where}{free} ({parts_text(use)})"


def _usable(config: Config, place: Place, unit: int, *, on_gpu: bool, server: bool) -> str:
    if not on_gpu:
        return "of the host"
    return f"{usable_bytes(config, place.gpu_bytes, server=server) / unit:.1f}" if place.gpu_bytes else "unknown"


def _row(use: DeviceUse, unit: int, usable: str) -> tuple[str, ...]:
    other = use.others + use.step + use.libraries + use.waiting
    sizes = (use.weights, use.gradients, use.optimizer, use.layers, use.head, use.cache, other, use.total)
    return (use.owner, *(f"{size / unit:.1f}" if size else "-" for size in sizes), usable)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

"""Resources that a trial needs of a Ray cluster, and whether its nodes have them. Pure.

A *bundle* is Ray's word for the resources of one node of the trial. The bundles of a placement group STRICT_SPREAD lie
on different Ray nodes, so a cluster can hold the trial if enough nodes have one bundle each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realsys.config.sections.schema_cluster import ClusterConfig

Resources = Mapping[str, float]

_MOST_NAMED = 4  # nodes that a message names
_GIB = 2**30
_MEMORY = "memory"  # Ray counts it in bytes


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node of a Ray cluster, with all its resources and those that nothing uses."""

    node_id: str
    host: str
    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)


def bundle_of(cluster: ClusterConfig) -> dict[str, float]:
    """Return the resources of one node of a trial. Without ``cluster.cpus_per_node`` it asks for one core."""
    memory = int(cluster.memory_gb_per_node * _GIB)
    own = {"CPU": float(cluster.cpus_per_node or 1), "GPU": float(cluster.gpus_per_node), _MEMORY: float(memory)}
    return {name: amount for name, amount in {**own, **cluster.ray.resources}.items() if amount}


def shortage(bundle: Resources, count: int, nodes: Sequence[RayNode], *, free: bool = False) -> str:
    """Return what the nodes lack for ``count`` bundles, with the numbers; "" if they can hold them.

    free   count only what nothing uses
    """
    offers = {node.node_id: node.free if free else node.total for node in nodes}
    short = [node for node in nodes if not _holds(offers[node.node_id], bundle)]
    fit = len(nodes) - len(short)
    if fit >= count:
        return ""
    named = [f"{node.host} has {as_text(bundle, offers[node.node_id])}" for node in short[:_MOST_NAMED]]
    named += [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
    rest = f" ({'; '.join(named)})" if named else ""
    having = "have that free" if free else "have that"
    needed = f"1 node with {as_text(bundle)} is" if count == 1 else f"{count} nodes with {as_text(bundle)} each are"
    return f"{needed} needed, {fit} of {len(nodes)} {having}{rest}"


def as_text(bundle: Resources, amounts: Resources | None = None) -> str:
    """Return the ``amounts`` of the resources that a bundle names, by default its own: ``CPU 8, memory 64 GiB``."""
    values = bundle if amounts is None else amounts
    return ", ".join(f"{name} {_amount(name, values.get(name, 0.0))}" for name in bundle)


def agent_name(host: str, node_id: str, hosts: Sequence[str]) -> str:
    """Return the name of an agent: its host, with a part of the Ray node's id if several nodes run on one host."""
    return host if hosts.count(host) < 2 else f"{host}-{node_id[:6]}"


def _holds(offer: Resources, bundle: Resources) -> bool:
    return all(offer.get(name, 0.0) >= amount for name, amount in bundle.items())


def _amount(name: str, value: float) -> str:
    return f"{value / _GIB:.4g} GiB" if name == _MEMORY else f"{value:g}"

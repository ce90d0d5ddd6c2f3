"""Sockets and addresses. A worker binds its socket first and registers the address afterwards.

Every process has one address, which it binds and advertises, and which gloo and NCCL use too (``take_address``):

    REALSYS_HOST in the environment, else cluster.interface, else cluster.host
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import psutil

from realsys.config.machine import port_range
from realsys.errors import ConfigError, RealsysError

if TYPE_CHECKING:  # every process imports this module first, and pydantic takes its time
    from realsys.config.schema import Config
    from realsys.config.schema_cluster import ClusterConfig

T = TypeVar("T")

HOST = "REALSYS_HOST"
PORTS = "REALSYS_PORTS"  # cluster.ports, for this process and those that it starts
#: Names of network interfaces, and their IP addresses without link-local ones.
Interfaces = Mapping[str, Sequence[str]]


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``.

    Names other than localhost count as reachable from outside, which is the safe assumption.
    """
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def bind_tcp(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket bound to ``host``. Port 0 means any free port (``own_ports``).

    The server that uses it calls ``listen``. Raises RealsysError if the address cannot be bound.
    """
    return bind_first([port] if port else own_ports(), lambda each: _bind(host, each), host)


def bind_problem(host: str, port: int) -> str:
    """Return why the address cannot be bound on this machine; empty if it can."""
    if port > 65535:
        return "a port is at most 65535"
    try:
        bind_tcp(host, port).close()
    except RealsysError as error:
        cause = error.__cause__
        return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    return ""


def own_ports() -> list[int]:
    """Return the ports on which this process may listen, in the order to try; 0 is any free one."""
    ports = list(port_range(os.environ.get(PORTS, "")))
    random.shuffle(ports)  # processes that start together would all try the same ones
    return ports or [0]


def bind_first(ports: Sequence[int], bind: Callable[[int], T], host: str) -> T:
    """Return ``bind(port)`` for the first port that is not taken. Raises RealsysError."""
    for port in ports:
        try:
            return bind(port)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            where, reason = join_host_port(host, port), exc.strerror or exc
            remedy = "check that the port is free and that the host is an address of this machine"
            if len(ports) > 1 and exc.errno == errno.EADDRINUSE:
                where, remedy = host, f"all {len(ports)} ports of cluster.ports are taken, so name a larger range"
            raise RealsysError(f"cannot bind {where}: {reason}; {remedy}") from exc
    raise AssertionError("there is a port to try")


def _bind(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    # The protocol is named, because asyncio sets TCP_NODELAY only then: else a reply may wait 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((bare, port))
        if os.environ.get(PORTS):
            bound.listen()  # else another process could bind the same port, and only its ``listen`` would fail
    except OSError:
        bound.close()
        raise
    return bound


def port_of(bound: socket.socket) -> int:
    """Return the port of a bound socket."""
    port = bound.getsockname()[1]
    assert isinstance(port, int)
    return port


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``host:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def advertised_host(host: str) -> str:
    """Return the address to register for a socket bound to ``host``: for a wildcard, one that other hosts reach.

    Raises ConfigError if ``host`` is a wildcard and this machine has several such addresses.
    """
    if host.strip("[]") not in ("", "0.0.0.0", "::"):
        return host
    return _reachable(host, interfaces(), _source_of_default_route())


# ---- the address of this process


def take_address(config: Config, environment: MutableMapping[str, str] = os.environ) -> Config:
    """Return the configuration with this process's address as ``cluster.host``; let gloo and NCCL use its interface.

    Sockets that are bound from now on listen in ``cluster.ports``.

    An interface that the environment gives them already stays. Call it before anything is bound or registered.
    Raises ConfigError for an address that this machine does not have, and for loopback in a plan of several nodes.
    """
    cluster, there = config.cluster, interfaces()
    environment[PORTS] = cluster.ports
    host, _, name = own_addresses(cluster, environment, there)
    environment.setdefault("GLOO_SOCKET_IFNAME", name)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=", NCCL takes eth10 for eth1 too
    return config.model_copy(update={"cluster": cluster.model_copy(update={"host": host})})


def own_addresses(cluster: ClusterConfig, environment: Mapping[str, str], there: Interfaces) -> tuple[str, str, str]:
    """Return the address to bind, the one to advertise and its interface. Raises ConfigError as ``take_address``."""
    host = own_host(cluster, environment.get(HOST, ""), there)
    reached = advertised_host(host)
    if cluster.machines > 1 and is_loopback(reached):
        problem = f"other hosts cannot reach {reached}, which this process of {cluster.machines} nodes would advertise"
        remedy = f"name an interface or a subnet, or set {HOST}"
        raise ConfigError("cluster.interface", cluster.interface, f"{problem}: {remedy}")
    return host, reached, _interface_of(reached, there)


def own_host(cluster: ClusterConfig, given: str, there: Interfaces) -> str:
    """Return the address to bind. ``given``: that of REALSYS_HOST, or "". Raises ConfigError."""
    if given:
        if not any(given.strip("[]") in addresses for addresses in there.values()):
            raise ConfigError(
                HOST, given, f"is no address of this machine, which has {_listed(there)}: set one of them"
            )
        return given
    if not cluster.interface:
        return cluster.host
    if found := _matching(cluster.interface, there):
        # IPv4 first: an interface often has both, and not all peers of a cluster have IPv6.
        return min(found, key=lambda address: ":" in address)
    problem = f"this machine has no address there: it has {_listed(there)}"
    raise ConfigError(
        "cluster.interface", cluster.interface, f"{problem}: name an interface or a subnet such as 10.0.0.0/8"
    )


def interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface of this machine. Link-local ones are left out."""
    there = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        there[name] = [address for address in addresses if "%" not in address]
    return there


def subnet_of(interface: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the subnet; None for the name of an interface. Raises ConfigError for a subnet in another form."""
    if "/" not in interface:
        return None
    try:
        return ipaddress.ip_network(interface, strict=False)
    except ValueError as error:
        raise ConfigError("cluster.interface", interface, f"cannot be read as a subnet: {error}") from None


def _matching(interface: str, there: Interfaces) -> list[str]:
    """Return the addresses of an interface, or those in a subnet. Raises ConfigError for a subnet in another form."""
    if (subnet := subnet_of(interface)) is None:
        return list(there.get(interface, ()))
    return [each for addresses in there.values() for each in addresses if ipaddress.ip_address(each) in subnet]


def _interface_of(host: str, there: Interfaces) -> str:
    """Return the name of the interface that has the address. Raises ConfigError."""
    bare = host.strip("[]")
    for name, addresses in there.items():
        if bare in addresses or (is_loopback(host) and any(map(is_loopback, addresses))):
            return name
    problem = f"is no address of a network interface of this machine, which has {_listed(there)}"
    raise ConfigError("cluster.host", host, f"{problem}: set one of them")


def _reachable(host: str, there: Interfaces, default: str) -> str:
    """Return the address of the default route, else the only one beyond loopback, else loopback.

    For "::" on a machine without IPv4, the same with IPv6.
    """
    every = [each for addresses in there.values() for each in addresses if not is_loopback(each)]
    beyond = [each for each in every if ":" not in each] or (every if ":" in host else [])
    if default in beyond:
        return default
    if len(beyond) > 1:
        problem = f"binds every interface, and this machine has {_listed(there)} and no default route"
        raise ConfigError("cluster.host", host, f"{problem}: choose with cluster.interface")
    return beyond[0] if beyond else "127.0.0.1"


def _source_of_default_route() -> str:
    """Return the own address on the way to other networks; "" without a way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # a network for documentation, which no route names
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _listed(there: Interfaces) -> str:
    return ", ".join(f"{name} {address}" for name, addresses in there.items() for address in addresses) or "none"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that were free a moment ago, for programs that cannot bind port 0 themselves.

    Another process may take a port before the program binds it. Then start the program again with new ports.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(bind_tcp(host))
        return [port_of(bound) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()

"""Addresses and bound sockets."""

import socket

import pytest

from realsys.cluster import network
from realsys.cluster.network import (
    advertised_host,
    bind_tcp,
    free_ports,
    is_loopback,
    join_host_port,
    port_of,
    split_host_port,
)
from realsys.cluster.stream.security import CurveKeys
from realsys.cluster.stream.sockets import bind_server
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError, RealsysError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "node7", "localhost.example.org", "::2"])
def test_reachable_from_elsewhere(host):
    assert not is_loopback(host)


def test_bound_socket_has_a_port_and_can_serve():
    with bind_tcp("127.0.0.1") as bound:
        bound.listen()
        with socket.create_connection(("127.0.0.1", port_of(bound)), timeout=60):
            pass


def test_taken_port_is_named():
    with bind_tcp("127.0.0.1") as bound:
        bound.listen()
        with pytest.raises(RealsysError, match=rf"cannot bind 127\.0\.0\.1:{port_of(bound)}: Address already in use"):
            bind_tcp("127.0.0.1", port_of(bound))


def test_address_of_another_machine_is_named():
    with pytest.raises(RealsysError, match=r"203\.0\.113\.1:0: Cannot assign"):
        bind_tcp("203.0.113.1")


def test_free_ports_are_distinct_and_can_be_bound():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    with bind_tcp("127.0.0.1", ports[0]) as bound:
        assert port_of(bound) == ports[0]


@pytest.fixture
def two_ports(monkeypatch):
    """Let this process listen on two ports, which were free a moment ago."""
    low = next(port for port in free_ports(20) if port < 65535 and not taken_port(port + 1))
    monkeypatch.setenv(network.PORTS, f"{low}-{low + 1}")
    return {low, low + 1}


def taken_port(port):
    try:
        bind_tcp("127.0.0.1", port).close()
    except RealsysError:
        return True
    return False


KEYS = CurveKeys.generate()  # without keys no port is taken


@pytest.mark.parametrize("bind", [bind_tcp, lambda host: bind_server(host, KEYS)], ids=["http", "stream"])
def test_ports_are_chosen_from_the_range(two_ports, bind):
    """And each only once, although the first user of a socket may not listen yet."""
    first, second = bind("127.0.0.1"), bind_tcp("127.0.0.1")
    try:
        own = port_of(first) if isinstance(first, socket.socket) else split_host_port(first.address)[1]
        assert {own, port_of(second)} == two_ports
        for again in (bind_tcp, lambda host: bind_server(host, KEYS)):
            with pytest.raises(RealsysError, match=r"cannot bind .* all 2 ports of cluster.ports are taken"):
                again("127.0.0.1")
    finally:
        first.close()
        second.close()


def test_addresses_as_text():
    assert join_host_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert join_host_port("::1", 80) == join_host_port("[::1]", 80) == "[::1]:80"
    assert split_host_port("[::1]:80") == ("::1", 80) and split_host_port("node7:80") == ("node7", 80)
    assert advertised_host("10.0.0.1") == "10.0.0.1"


# ---- the address of a process

THERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["fd00::7", "10.0.0.7"], "ib0": ["10.1.0.7"]}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: THERE)
    monkeypatch.setattr(network, "_source_of_default_route", lambda: "")


def taken(environment=None, **cluster):
    """Return the host that a process takes, and the interface of gloo."""
    env = dict(environment or {})
    host = network.take_address(Config(cluster=ClusterConfig(**cluster)), env).cluster.host
    return host, env["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize(
    ("cluster", "given", "address", "interface"),
    [
        ({}, "", "127.0.0.1", "lo"),
        ({"host": "localhost"}, "", "localhost", "lo"),
        ({"host": "127.0.0.2"}, "", "127.0.0.2", "lo"),
        ({"host": "10.0.0.7"}, "", "10.0.0.7", "eth0"),
        ({"host": "[fd00::7]"}, "", "[fd00::7]", "eth0"),
        ({"interface": "eth0"}, "", "10.0.0.7", "eth0"),
        ({"interface": "10.1.0.0/16"}, "", "10.1.0.7", "ib0"),
        ({"interface": "fd00::/8"}, "", "fd00::7", "eth0"),
        ({"interface": "eth0"}, "10.1.0.7", "10.1.0.7", "ib0"),
        ({}, "[fd00::7]", "[fd00::7]", "eth0"),
    ],
)
def test_process_takes_its_own_address(cluster, given, address, interface):
    assert taken({"REALSYS_HOST": given}, **cluster) == (address, interface)


@pytest.mark.parametrize(
    ("cluster", "given", "problem"),
    [
        ({"interface": "eth1"}, "", "cluster.interface='eth1': this machine has no address there: it has lo 127"),
        ({"interface": "10.2.0.0/16"}, "", "cluster.interface='10.2.0.0/16': this machine has no address there"),
        ({"interface": "10.2/x"}, "", "cluster.interface='10.2/x': cannot be read as a subnet"),
        ({}, "10.0.0.8", "REALSYS_HOST='10.0.0.8': is no address of this machine"),
        ({"host": "node7"}, "", "cluster.host='node7': is no address of a network interface of this machine"),
        ({"host": "0.0.0.0"}, "", "cluster.host='0.0.0.0': binds every interface, and this machine has lo 127.0.0.1"),
        ({"nodes": 2}, "", "cluster.interface='': other hosts cannot reach 127.0.0.1, which this process of 2 nodes"),
        ({"nodes": 2, "interface": "lo"}, "", "other hosts cannot reach 127.0.0.1"),
        ({"nodes": 1, "spare_nodes": 1}, "", "other hosts cannot reach 127.0.0.1, which this process of 2 nodes"),
    ],
)
def test_address_that_cannot_serve_is_refused(cluster, given, problem):
    with pytest.raises(ConfigError) as caught:
        taken({"REALSYS_HOST": given}, **cluster)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_wildcard_advertises_the_default_route(monkeypatch):
    monkeypatch.setattr(network, "_source_of_default_route", lambda: "10.1.0.7")
    assert taken(host="0.0.0.0", nodes=2) == ("0.0.0.0", "ib0")
    assert advertised_host("0.0.0.0") == "10.1.0.7"


def test_wildcard_without_network_advertises_loopback(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"]})
    assert taken(host="0.0.0.0") == ("0.0.0.0", "lo")


def test_given_interfaces_of_gloo_and_nccl_stay():
    env = {"GLOO_SOCKET_IFNAME": "a", "NCCL_SOCKET_IFNAME": "b"}
    network.take_address(Config(), env)
    assert env == {"GLOO_SOCKET_IFNAME": "a", "NCCL_SOCKET_IFNAME": "b", network.PORTS: ""}
    env.clear()
    network.take_address(Config(), env)
    assert env == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", network.PORTS: ""}


def test_wildcard_without_ipv4_advertises_ipv6(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1", "::1"], "eth0": ["fd00::7"]})
    assert taken(host="::", nodes=2) == ("::", "eth0")
    assert advertised_host("::") == "fd00::7"


def test_bound_socket_names_its_protocol():
    """Otherwise asyncio leaves Nagle's algorithm on, and replies on kept connections wait for delayed ACKs."""
    with bind_tcp("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP

"""Addresses and bound sockets."""

from __future__ import annotations

import socket

import pytest

from realsys.cluster.network import advertised_host, bind_tcp, free_ports, is_loopback, join_host_port, port_of
from realsys.errors import RealsysError


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


def test_addresses_as_text():
    assert join_host_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert join_host_port("::1", 80) == join_host_port("[::1]", 80) == "[::1]:80"
    assert advertised_host("10.0.0.1") == "10.0.0.1"
    assert advertised_host("0.0.0.0") == socket.gethostname()

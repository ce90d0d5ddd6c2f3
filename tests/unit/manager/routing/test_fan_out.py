"""Which server reads a version from storage, and which from a host that has it."""

from __future__ import annotations

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.fan_out import FanOut
from realsys.manager.routing.servers import Idle, Pace, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress

VERSION = PublishedVersion(1, "t", "/v1", 1)
PATIENCE_S = 60.0


class Hosts:
    """Servers named host/number, all of which must be updated. ``orders``: updates that were begun."""

    def __init__(self, names: list[str], storage_readers: int, *, copies: bool = True) -> None:
        self.now = 0.0
        self.orders: dict[str, UpdateOrder] = {}
        self.registry = ServerRegistry(StalenessBound(2, 1), Pace(), fan_out=FanOut(storage_readers, PATIENCE_S))
        addresses = []
        for name in names:
            host = name.partition("/")[0]
            addresses.append(ServerAddress(name, f"http://{name}", 1, host, "1", f"http://{host}" if copies else ""))
        self.registry.observe(addresses)
        self.registry.publish(VERSION)

    def decide(self) -> dict[str, str]:
        """Let the due servers decide. Returns server -> source of those that begin now; "": storage."""
        begun = {}
        while self.registry.due:
            name = min(self.registry.due)
            self.registry.due.remove(name)
            order = self.registry.next_order(name, "1", self.now)
            if isinstance(order, UpdateOrder) and name not in self.orders:
                self.registry.started(order, self.now)
                self.orders[name] = order
                begun[name] = next(iter(order.sources), "")
        return begun

    def succeed(self, name: str) -> None:
        self.registry.succeeded(self.orders[name], 1.0, {})

    def fail(self, name: str) -> None:
        self.registry.failed(self.orders.pop(name), "no", self.now)


def test_without_fan_out_all_read_storage() -> None:
    assert Hosts(["a/0", "b/0"], 0).decide() == {"a/0": "", "b/0": ""}
    assert Hosts(["a/0", "b/0"], 1, copies=False).decide() == {"a/0": "", "b/0": ""}


def test_waiting_hosts_read_from_those_that_have_it() -> None:
    hosts = Hosts([f"{name}/0" for name in "abcdef"], 1)
    assert hosts.decide() == {"a/0": ""}
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}
    hosts.succeed("b/0")
    assert sorted(hosts.decide().values()) == ["http://a", "http://b"], "c still reads storage, the others send"


def test_servers_of_one_host_begin_together() -> None:
    """The second shares the copy of the first, and costs neither storage nor another host anything."""
    hosts = Hosts(["a/0", "a/1", "b/0", "b/1"], 1)
    assert hosts.decide() == {"a/0": "", "a/1": ""}
    hosts.succeed("a/1")
    assert hosts.decide()["b/0"] == "http://a"


def test_failed_reader_frees_its_place() -> None:
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.fail("a/0")
    assert hosts.decide() == {"b/0": ""}


def test_wait_for_a_host_has_an_end() -> None:
    hosts = Hosts(["a/0", "b/0"], 1)
    hosts.decide()
    assert hosts.registry.next_order("b/0", "1", 10.0) == Idle(PATIENCE_S)
    order = hosts.registry.next_order("b/0", "1", PATIENCE_S)
    assert isinstance(order, UpdateOrder) and order.sources == ()


def test_silent_host_is_no_source() -> None:
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    server = hosts.registry.get("a/0")
    assert server is not None
    server.health.apply("update_failed", 0.0)
    probe = hosts.registry.next_probe("a/0", "1", 0.0)
    assert hosts.registry.silent(probe, "no answer", 0.0)  # type: ignore[arg-type]
    assert hosts.decide() == {"b/0": ""}


def test_64_hosts_have_it_in_eight_copies() -> None:
    """The time of a copy is that of the storage and of a link: 1 s for 1 GB at 1 GB/s. Storage alone takes 64 s."""
    hosts, rounds, reads = Hosts([f"{number:02d}/0" for number in range(64)], 1), 0, 0
    while begun := hosts.decide():
        rounds += 1
        reads += sum(not source for source in begun.values())
        senders = [source for source in begun.values() if source]
        assert len(set(senders)) == len(senders), "a host sends to one host at a time"
        for name in begun:
            hosts.succeed(name)
    assert len(hosts.orders) == 64
    assert rounds <= 8 and reads <= rounds

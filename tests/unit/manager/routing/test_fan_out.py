"""Which server reads a version from storage, and which from a host that has it."""

from __future__ import annotations

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.servers import FanOut, Idle, Pace, ServerRegistry, UpdateOrder
from realsys.types import PublishedVersion, ServerAddress

VERSION, NEWER = PublishedVersion(1, "t", "/v1", 1), PublishedVersion(2, "t", "/v2", 2)
PATIENCE_S = 60.0


class Hosts:
    """Servers named host/number, all of which must be updated. ``orders``: the last update of each that was begun."""

    def __init__(self, names: list[str], storage_readers: int, *, copies: bool = True) -> None:
        self.now = 0.0
        self.orders: dict[str, UpdateOrder] = {}
        self._running: set[str] = set()
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
            if isinstance(order, UpdateOrder) and name not in self._running:
                self.registry.started(order, self.now)
                self._running.add(name)
                self.orders[name] = order
                begun[name] = next(iter(order.sources), "")
        return begun

    def publish(self, version: PublishedVersion) -> None:
        self.registry.publish(version)

    def succeed(self, name: str) -> None:
        self._running.remove(name)
        self.registry.succeeded(self.orders[name], 1.0, {})

    def fail(self, name: str) -> None:
        self._running.remove(name)
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


def test_reader_that_hangs_is_replaced_by_one() -> None:
    """All waiting hosts together would take the storage from each other, and from a reader that is only slow."""
    hosts = Hosts(["a/0", "b/0", "c/0", "d/0"], 1)
    hosts.decide()
    assert hosts.registry.next_order("b/0", "1", 10.0) == Idle(PATIENCE_S)
    hosts.now = PATIENCE_S
    hosts.registry.due.update(["b/0", "c/0", "d/0"])
    assert hosts.decide() == {"b/0": ""}
    assert hosts.registry.next_order("c/0", "1", PATIENCE_S) == Idle(2 * PATIENCE_S)


def test_sender_stages_no_newer_version_meanwhile() -> None:
    """Its copy would change under the host that reads it, which would read the rest from the storage."""
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}
    hosts.publish(NEWER)
    assert hosts.decide() == {} and hosts.registry.next_order("a/0", "1", 0.0) == Idle(PATIENCE_S)
    hosts.succeed("b/0")
    assert hosts.decide() == {"a/0": ""}
    hosts.succeed("c/0")
    hosts.succeed("a/0")
    assert hosts.decide() == {"b/0": "http://a", "c/0": ""}


def test_free_host_begins_while_another_sends() -> None:
    hosts = Hosts(["a/0", "b/0", "c/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    hosts.decide()
    hosts.publish(NEWER)
    hosts.decide()
    hosts.succeed("c/0")
    assert hosts.decide() == {"c/0": ""}, "a sends to b"


def test_transfer_that_hangs_delays_its_sender_once() -> None:
    hosts = Hosts(["a/0", "b/0"], 1)
    hosts.decide()
    hosts.succeed("a/0")
    hosts.decide()
    hosts.publish(NEWER)
    hosts.now = PATIENCE_S
    assert hosts.decide() == {"a/0": ""}


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

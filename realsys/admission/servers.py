"""What the manager knows of each generation server. Pure: time comes in as an argument.

    registered ──> updating ──> ready at a verified version ──> updating ──> ...
                      │             │
                      └──> quarantined <──┘  failed; not routable until it has verified the newest version

A server that is updating stays routable inside the staleness bound: it goes on generating while it stages.
A server that left the name store is gone at once; one that comes back as a new incarnation starts as registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from realsys.types import PublishedVersion, ServerAddress

State = Literal["registered", "draining", "updating", "ready", "quarantined"]


@dataclass(slots=True)
class Server:
    """One incarnation of one server."""

    address: ServerAddress
    verified: PublishedVersion | None = None
    target: PublishedVersion | None = None  # of the update under way
    draining: bool = False  # takes no new rollout until it has been updated
    quarantined: bool = False
    failures: int = 0  # in a row
    retry_at: float = 0.0
    error: str = ""  # of the last failure
    epoch: int = 0  # grows when the server leaves quarantine: failures from before are old news
    updates: int = 0
    update_s: float = 0.0  # of the last update
    timings: dict[str, float] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)  # as the server counts it; empty until it has said so

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def state(self) -> State:
        if self.quarantined:
            return "quarantined"
        if self.draining:
            return "draining"
        if self.target is not None:
            return "updating"
        return "registered" if self.verified is None else "ready"


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """What a server's update task does next. ``probe``: the server may have the version already, so ask first."""

    server: str
    incarnation: str
    url: str
    target: PublishedVersion
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something changes, or until ``until`` if that is set."""

    until: float | None = None


class ServerRegistry:
    """All registered servers. News of a server that is gone or has restarted is ignored."""

    def __init__(self, *, backoff_s: float = 0.5, backoff_max_s: float = 30.0) -> None:
        self._backoff_s, self._backoff_max_s = backoff_s, backoff_max_s
        self._servers: dict[str, Server] = {}
        self.published: PublishedVersion | None = None

    def all(self) -> list[Server]:
        return sorted(self._servers.values(), key=lambda server: server.name)

    def get(self, name: str) -> Server | None:
        return self._servers.get(name)

    def incarnation(self, name: str, incarnation: str) -> Server | None:
        """The server if it is still this incarnation."""
        server = self._servers.get(name)
        return server if server is not None and server.address.incarnation == incarnation else None

    # -- events ------------------------------------------------------------------------------------------------------

    def observe(self, addresses: Iterable[ServerAddress]) -> list[str]:
        """The name store's current list. Returns the names that are gone or have restarted."""
        seen = {address.name: address for address in addresses}
        lost = [name for name, server in self._servers.items() if seen.get(name) != server.address]
        for name in lost:
            del self._servers[name]
        for name, address in seen.items():
            self._servers.setdefault(name, Server(address))
        return lost

    def publish(self, published: PublishedVersion) -> bool:
        """A new version; False (and nothing happens) if it is not newer: versions never go back."""
        if self.published is not None and published.version <= self.published.version:
            return False
        self.published = published
        for server in self._servers.values():
            server.retry_at = 0.0  # the new version may be readable where the last one was not
        return True

    def restore(self, published: PublishedVersion) -> None:
        """Training went back to a checkpoint: later weights belong to a dead incarnation, not to be served."""
        self.published = published
        for server in self._servers.values():
            if server.verified is not None and server.verified.version >= published.version:
                server.verified = None

    def next_order(self, name: str, incarnation: str, now: float) -> UpdateOrder | Idle | None:
        """What the update task of this incarnation does next; None: the task is over."""
        server = self.incarnation(name, incarnation)
        if server is None:
            return None
        if self.published is None or (server.verified == self.published and not server.quarantined):
            return Idle()
        if server.retry_at > now:
            return Idle(server.retry_at)
        probe = server.verified is None and not server.quarantined
        return UpdateOrder(name, incarnation, server.address.url, self.published, probe)

    def started(self, order: UpdateOrder) -> None:
        if server := self.incarnation(order.server, order.incarnation):
            server.target = order.target

    def drain(self, order: UpdateOrder) -> None:
        if server := self.incarnation(order.server, order.incarnation):
            server.draining = True

    def succeeded(self, order: UpdateOrder, seconds: float, timings: Mapping[str, float]) -> bool:
        """The server proved to serve the order's version. It leaves quarantine only if that is still the newest."""
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        server.target, server.draining, server.verified = None, False, order.target
        server.update_s, server.timings = seconds, dict(timings)
        server.updates += 1
        if self.published == order.target:
            server.epoch += server.quarantined
            server.quarantined, server.failures, server.error = False, 0, ""
        return True

    def failed(self, order: UpdateOrder, error: str, now: float) -> bool:
        """An update failed or timed out: quarantine, and try again later, with the newest version then."""
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        server.target, server.draining = None, False
        self._quarantine(server, error, now)
        if self.published != order.target:
            server.retry_at = 0.0  # a newer version has not been tried yet
        return True

    def report_failure(self, name: str, epoch: int, error: str, now: float) -> bool:
        """A rollout could not generate there. Ignored if the server has proved itself since, or is in quarantine."""
        server = self._servers.get(name)
        if server is None or server.epoch != epoch or server.quarantined:
            return False
        self._quarantine(server, error, now)
        server.retry_at = now  # proving itself needs no delay the first time
        return True

    def _quarantine(self, server: Server, error: str, now: float) -> None:
        server.quarantined, server.error = True, error[:500]
        server.failures += 1
        server.retry_at = now + min(self._backoff_max_s, self._backoff_s * 2 ** min(server.failures - 1, 16))

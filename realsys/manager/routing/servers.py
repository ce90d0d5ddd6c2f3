"""What the manager knows of each generation server. Pure: time comes in as an argument.

    registered ──> updating ──> ready at a verified version ──> updating ──> ...
                      │             │
                      └──> quarantined <──┘  failed; not routable until it has verified the newest version

A server that is updating stays routable inside the staleness bound: it goes on generating while it stages.
A server that left the name store is gone at once; one that comes back as a new incarnation starts as registered.
When training starts again (``roll_back``) nothing is trusted until the new training side has published and a server has
verified that: versions are ordered by (incarnation of the training side, number).

**Roll-out.** All servers update at once, or in turns (``Pace``): then a server that serves takes a slot before it
begins, oldest weights first. One that serves nobody (new, quarantined, too stale) has nothing to lose and needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from realsys.manager.ledger.staleness import StalenessBound
from realsys.manager.routing.update_times import UpdateLog
from realsys.types import PublishedVersion, ServerAddress

State = Literal["registered", "draining", "updating", "ready", "quarantined"]


@dataclass(slots=True)
class Server:
    """One incarnation of one server."""

    address: ServerAddress
    verified: PublishedVersion | None = None
    target: PublishedVersion | None = None  # of the update under way
    began: float | None = None  # when that update, or draining for it, began
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
class Pace:
    """How many of the serving servers may update at a time: ``fraction`` of them, but at least one; 1: all.

    A server that holds its slot for longer than ``retry_timeout_s`` no longer counts. So a slow or hanging server
    delays the others once, and no longer than that.
    """

    fraction: float = 1.0
    retry_timeout_s: float = 30.0

    def slots(self, serving: int) -> int:
        return max(1, int(self.fraction * serving))


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

    def __init__(
        self, bound: StalenessBound, pace: Pace, *, backoff_s: float = 0.5, backoff_max_s: float = 30.0
    ) -> None:
        self._bound, self._pace = bound, pace
        self._backoff_s, self._backoff_max_s = backoff_s, backoff_max_s
        self._servers: dict[str, Server] = {}  # in the order of their names
        self.published: PublishedVersion | None = None
        self.trainer_incarnation = ""  # incarnation of the training side; publications of older ones are refused
        self.updates = UpdateLog()
        self.revision = 0  # grows with every change to what can be routed where

    def all(self) -> list[Server]:
        return list(self._servers.values())

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
        self._servers = {name: self._servers.get(name) or Server(seen[name]) for name in sorted(seen)}
        self.revision += 1
        return lost

    def publish(self, published: PublishedVersion) -> bool:
        """A new version; False (and nothing happens) if it is not newer: within an incarnation versions never go back,
        and what an older incarnation publishes is never served again.
        """
        if published.incarnation < self.trainer_incarnation:
            return False
        if self.published is not None and _age(published) <= _age(self.published):
            return False
        self.published = published
        self.revision += 1
        for server in self._servers.values():
            server.retry_at = 0.0  # the new version may be readable where the last one was not
        return True

    def roll_back(self, incarnation: str) -> None:
        """The training side ``incarnation`` starts: no server is trusted before it has verified what that publishes."""
        self.trainer_incarnation, self.published = incarnation, None
        self.revision += 1
        for server in self._servers.values():
            server.verified, server.draining, server.retry_at = None, False, 0.0
            if server.target is None:
                server.began = None  # it was drained for an update that will not come

    def current(self, server: Server) -> PublishedVersion | None:
        """What it serves, if that is verified, of the incarnation that trains, and the server not in quarantine."""
        if server.verified is None or server.quarantined or self.published is None:
            return None
        return server.verified if server.verified.incarnation == self.published.incarnation else None

    def trusts(self, server: Server) -> bool:
        """Whether train tokens may come from this server: verified, not in quarantine, fresh enough."""
        served = self.current(server)
        return (
            served is not None
            and self.published is not None
            and (self._bound.may_serve(served.version, self.published.version))
        )

    # -- updates -----------------------------------------------------------------------------------------------------

    def next_order(self, name: str, incarnation: str, now: float) -> UpdateOrder | Idle | None:
        """What the update task of this incarnation does next; None: the task is over."""
        server = self.incarnation(name, incarnation)
        if server is None:
            return None
        if self.published is None or (server.verified == self.published and not server.quarantined):
            return Idle()
        if server.retry_at > now:
            return Idle(server.retry_at)
        if (until := self._turn(server, now)) > now:
            return Idle(until)
        probe = server.verified is None and not server.quarantined
        return UpdateOrder(name, incarnation, server.address.url, self.published, probe)

    def _turn(self, server: Server, now: float) -> float:
        """When to ask again for a slot if nothing changes before; now: the slot is this server's."""
        if self._pace.fraction >= 1 or server.began is not None or not self.trusts(server):
            return now
        serving = [s for s in self._servers.values() if self.trusts(s)]
        ends = [s.began + self._pace.retry_timeout_s for s in serving if s.began is not None]
        holding = [end for end in ends if end > now]
        waiting = [s for s in serving if s.began is None and s.verified is not None and s.verified != self.published]
        waiting.sort(key=lambda s: (s.verified.version if s.verified else 0, s.name))
        free = self._pace.slots(len(serving)) - len(holding)
        if any(s is server for s in waiting[: max(0, free)]):
            return now
        # With a free slot it is another's turn, who may hang from now on.
        return min(holding) if free <= 0 else now + self._pace.retry_timeout_s

    def started(self, order: UpdateOrder, now: float) -> None:
        if server := self.incarnation(order.server, order.incarnation):
            server.target = order.target
            server.began = now if server.began is None else server.began

    def drain(self, order: UpdateOrder, now: float) -> None:
        if server := self.incarnation(order.server, order.incarnation):
            server.draining = True
            self.revision += 1
            server.began = now if server.began is None else server.began

    def succeeded(self, order: UpdateOrder, seconds: float, timings: Mapping[str, float] | None) -> bool:
        """The server proved to serve the order's version. It leaves quarantine only if that is still the newest.

        ``timings`` are those of its update; None: it had the version already.
        """
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        if timings is not None:
            self.updates.add(order.server, order.target.version, server.began or 0.0, seconds, timings)
            server.update_s, server.timings = seconds, dict(timings)
            server.updates += 1
        server.target, server.began, server.draining = None, None, False
        server.verified = (
            None if order.target.incarnation < self.trainer_incarnation else order.target
        )  # began before a roll-back
        self.revision += 1
        if self.published == order.target:
            server.epoch += server.quarantined
            server.quarantined, server.failures, server.error = False, 0, ""
        return True

    def failed(self, order: UpdateOrder, error: str, now: float) -> bool:
        """An update failed or timed out: quarantine, and try again later, with the newest version then."""
        server = self.incarnation(order.server, order.incarnation)
        if server is None:
            return False
        self.updates.add_failure(order.server, order.target.version, server.began or now, error[:500])
        server.target, server.began, server.draining = None, None, False
        if order.target.incarnation < self.trainer_incarnation:
            return True  # of weights that nobody wants any more
        self._quarantine(server, error, now)
        if self.published != order.target:
            server.retry_at = 0.0  # a newer version has not been tried yet
        return True

    # -- failures ----------------------------------------------------------------------------------------------------

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
        self.revision += 1
        server.failures += 1
        server.retry_at = now + min(self._backoff_max_s, self._backoff_s * 2 ** min(server.failures - 1, 16))


def _age(published: PublishedVersion) -> tuple[str, int]:
    return published.incarnation, published.version

"""Router: chooses a server for a request by registry, load, expected length and strategy.

every server ──verified, trusted, fresh, not drained──> routes ──strategy──> one server, with a reservation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.manager.routing.placement import (
    ExpectedLength,
    Reservation,
    Reservations,
    RouteRequest,
    ServerLoad,
    Strategy,
)
from realsys.manager.routing.server_table import Server, ServerTable


@dataclass(frozen=True, slots=True)
class Exactly:
    """The one version that a completion of an evaluation may be sampled with."""

    version: int


#: Oldest version that a train ticket accepts, None for any within its bound; ``Exactly`` for evaluations.
Demand = int | Exactly | None


class Router:
    """Pure. ``reuse_versions``: versions by which a cached prefix may be older than a server's weights."""

    def __init__(
        self, servers: ServerTable, reservations: Reservations, strategy: Strategy, reuse_versions: int = 0
    ) -> None:
        self._servers = servers
        self._reservations = reservations
        self._strategy = strategy
        self._reuse_versions = reuse_versions
        self.lengths = ExpectedLength()
        self._revision = -1  # revision of the registry that the routes belong to
        self._routes: dict[Demand, list[ServerLoad]] = {}

    def routes(self, minimum: Demand) -> Sequence[ServerLoad]:
        """Return the servers that take new tickets, computed once per change in the registry."""
        if self._revision != self._servers.revision:
            self._revision = self._servers.revision
            self._routes.clear()
        if minimum not in self._routes:
            self._routes[minimum] = [
                self._reservations.live(server.name, server.verified.version)
                for server in self._servers.all()
                if server.verified is not None and not server.draining and self._fresh(server, minimum)
            ]
        return self._routes[minimum]

    def place(
        self, request: ScheduleRequest, minimum: Demand, held: Reservation | None, worker: str, now: float
    ) -> ScheduleReply | None:
        """Choose a server and reserve a place on it, instead of the call's place ``held``. None without a server.

        Not a server that ``worker`` has reported and that is being probed. ``request.avoid`` only if there is no other.
        """
        candidates = self._candidates(minimum, held)
        if self._servers.reports:
            candidates = [s for s in candidates if not self._servers.avoids(worker, s.name)]
        if not candidates:
            return None
        candidates = [server for server in candidates if server.name != request.avoid] or candidates
        tokens, expected = request.n * request.prompt_len, self.lengths.within(request.max_new_tokens)
        self._reservations.release_call(request.ticket_id, request.call)  # its own place must not count against it
        previous, version = (held.server, held.version) if held else request.previous or (None, None)
        size = tokens + request.n * expected
        route = RouteRequest(
            request.ticket_id, request.n, size, previous, version, request.prefix, expected, self._reuse_versions
        )
        name = self._strategy.choose(route, candidates)
        server = self._servers.get(name)
        assert server is not None and server.verified is not None, f"strategy chose {name}, not a candidate"
        serves = server.verified.version
        place = Reservation(name, request.n, tokens, serves, server.health.epoch, now)
        self._reservations.reserve(request.ticket_id, place, request.call)
        return ScheduleReply(name, server.address.url, serves)

    def _candidates(self, minimum: Demand, held: Reservation | None) -> Sequence[ServerLoad]:
        """Return the routes of a call. A draining server takes no new ticket, but its calls may stay."""
        routes = self.routes(minimum)
        server = self._servers.get(held.server) if held else None
        if server is None or not server.draining or server.verified is None or not self._fresh(server, minimum):
            return routes
        return [*routes, self._reservations.live(server.name, server.verified.version)]

    def _fresh(self, server: Server, minimum: Demand) -> bool:
        """Return True for a trusted server: within the bound, at ``minimum`` or newer, or at exactly one version."""
        if minimum is None:
            return self._servers.trusts(server)
        if isinstance(minimum, Exactly):
            return self._servers.evaluates(server, minimum.version)
        served, published = self._servers.current(server), self._servers.published
        return served is not None and published is not None and minimum <= served.version <= published.version

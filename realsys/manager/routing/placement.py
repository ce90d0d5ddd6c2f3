"""Placement: pure strategies that choose a server by its load, and the reservations that the load consists of.

A reservation belongs to a call of a ticket, because an agent may have several calls of one ticket under way. Scheduling
a call again moves its reservation. It is released exactly once: by the end of its call or its ticket, by a move, or by
the death of its server.

The load of a server is its last report, changed by the reservations that began or ended since. The report is what the
manager cannot know: the completions of a call that have ended, and the calls that an earlier manager has placed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from realsys.manager.messages import ScheduleReply, ScheduleRequest
from realsys.manager.routing.servers import Server, ServerRegistry
from realsys.types import PublishedVersion

#: Seconds between two reports of a server's load.
LOAD_PERIOD_S = 2.0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Input of a strategy. ``previous``: the server whose cache holds the prefix, with the version of its weights.

    ``prefix``: the prompt's block hashes, shortest prefix first (``routing.prefix``); empty if unknown.
    ``reuse_versions``: versions by which a cached prefix may be older than the server's weights.
    """

    ticket_id: str
    sequences: int
    tokens: float  # expected in the cache in the end: n * (prompt + ``expected``)
    previous: str | None = None
    previous_version: int | None = None
    prefix: Sequence[int] = ()
    expected: float = 0.0  # tokens that each completion has still to sample, also those that run on the servers
    reuse_versions: int = 0

    def tokens_on(self, server: ServerLoad) -> float:
        """Return the tokens that ``server`` is expected to hold when its present completions end."""
        return server.tokens + self.expected * server.requests

    def reuses(self, version: int | None, server: ServerLoad) -> bool:
        """Return True if ``server`` may use keys that weights of ``version`` have computed; None: there are none."""
        return version is not None and 0 <= server.version - version <= self.reuse_versions


@dataclass(slots=True)
class ServerLoad:
    """A routable server: the version that it serves, and its load."""

    name: str
    version: int
    requests: float = 0  # sequences
    tokens: float = 0  # tokens in its cache


class Strategy(Protocol):
    """Chooses among at least one routable server."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str: ...


class RoundRobin:
    """Each server in turn, by name, without regard to its load."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        names = sorted(server.name for server in servers)
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class LeastRequests:
    """The server with the fewest sequences."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        return min(servers, key=_BY_REQUESTS).name


class LeastTokens:
    """The server with the fewest expected tokens."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        return _least(request, servers).name


_BY_REQUESTS = attrgetter("requests", "tokens", "name")


def _least(request: RouteRequest, servers: Sequence[ServerLoad]) -> ServerLoad:
    return min(servers, key=lambda server: (request.tokens_on(server), server.requests, server.name))


@dataclass(frozen=True, slots=True)
class LoadGate:
    """Limit on the load of a server that is preferred for its cache.

    It may have ``ratio`` times the tokens of the least loaded server plus ``slack`` requests of this size. Without it,
    a popular prefix overloads one server, as hashing prefixes to servers does.
    """

    ratio: float = 1.5
    slack: float = 4.0

    def limit(self, request: RouteRequest, least: ServerLoad) -> float:
        """Return the most tokens that a preferred server may be expected to hold."""
        return self.ratio * request.tokens_on(least) + self.slack * request.tokens


class StickyLeastLoaded:
    """The server that holds the tokens so far, while its weights may use them and the gate allows it.

    A weight update beyond that voids the cached prefix, so the ticket is placed anew, on the least loaded server.
    """

    def __init__(self, gate: LoadGate | None = None) -> None:
        self._gate = gate or LoadGate()

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = _least(request, servers)
        if request.previous is None:
            return least.name
        return _held_by_previous(request, servers, self._gate.limit(request, least)) or least.name


class PrefixAware:
    """Sticky; a ticket without a place goes where the longest part of its prompt was sent last, inside the gate.

    It assumes that a server caches the prefixes that were sent there under its present weights. A wrong assumption (its
    cache was full, a block hash collided) costs only a prefill. It remembers the ``capacity`` prefixes used last.
    """

    def __init__(self, gate: LoadGate | None = None, capacity: int = 65536) -> None:
        self._gate = gate or LoadGate()
        self._capacity = capacity
        self._holders: OrderedDict[int, dict[str, int]] = OrderedDict()  # prefix -> server -> version

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = _least(request, servers)
        limit = self._gate.limit(request, least)
        chosen = _held_by_previous(request, servers, limit) or self._longest_match(request, servers, limit)
        name = chosen or least.name
        self._remember(request.prefix, next(server for server in servers if server.name == name))
        return name

    def _longest_match(self, request: RouteRequest, servers: Sequence[ServerLoad], limit: float) -> str | None:
        for prefix in reversed(request.prefix):
            holders = self._holders.get(prefix)
            if holders is not None:
                fit = [s for s in servers if request.tokens_on(s) <= limit and request.reuses(holders.get(s.name), s)]
                if fit:
                    return _least(request, fit).name
        return None

    def _remember(self, prefixes: Sequence[int], server: ServerLoad) -> None:
        for prefix in prefixes:
            self._holders.setdefault(prefix, {})[server.name] = server.version
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


def _held_by_previous(request: RouteRequest, servers: Sequence[ServerLoad], limit: float) -> str | None:
    """Return the server that holds the prefix, if its weights may use it and its load is at most ``limit`` tokens."""
    for server in servers:
        if server.name == request.previous:
            held = request.reuses(request.previous_version, server) and request.tokens_on(server) <= limit
            return server.name if held else None
    return None


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "sticky": StickyLeastLoaded,
    "prefix": PrefixAware,
}


def make_strategy(name: str) -> Strategy:
    """Make the strategy that ``config.manager.routing`` names."""
    return STRATEGIES[name]()


class ExpectedLength:
    """Mean length of the completions that have ended, mostly of the last ``window``."""

    def __init__(self, window: int = 1024) -> None:
        self._window = window
        self._count = 0
        self._mean = 0.0

    def add(self, lengths: Iterable[int]) -> None:
        for length in lengths:
            self._count = min(self._count + 1, self._window)
            self._mean += (length - self._mean) / self._count

    def within(self, limit: int) -> float:
        """Return the expected length of a completion that ends at ``limit``; the limit before the first has ended."""
        return min(self._mean, limit) if self._count else limit


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call's place on a server: ``tokens`` that are sent, ``placed`` when.

    The server's ``epoch`` then tells old failure reports from new ones.
    """

    server: str
    sequences: int
    tokens: int
    version: int
    epoch: int
    placed: float = 0.0
    pinned: bool = False  # only this version may sample it


@dataclass(slots=True)
class _Places:
    """The calls on one server, and its load.

    A call from before the last report counts as the ``share`` of its sequences that the server still worked on then,
    with ``cached`` tokens each. So its end takes from the load what the report has counted.
    """

    load: ServerLoad
    calls: dict[tuple[str, str], Reservation] = field(default_factory=dict)
    reported: float = -math.inf  # time of the last report
    share: float = 1.0
    cached: float = 0.0

    def count(self, place: Reservation, sign: int) -> None:
        """Add a call to the load, or remove it."""
        old = place.placed < self.reported
        sequences = place.sequences * (self.share if old else 1.0)
        self.load.requests += sign * sequences
        self.load.tokens += sign * (sequences * self.cached if old else place.tokens)

    def report(self, sequences: int, tokens: int, asked: float) -> None:
        self.reported = asked
        before = sum(place.sequences for place in self.calls.values() if place.placed < asked)
        self.share = min(1.0, sequences / before) if before else 0.0
        self.cached = tokens / sequences if sequences else 0.0
        self.load.requests, self.load.tokens = float(sequences), float(tokens)
        for place in self.calls.values():
            if place.placed >= asked:
                self.count(place, 1)


class Reservations:
    """All reservations, by ticket and call, and the load per server."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, dict[str, Reservation]] = {}  # no ticket without a call
        self._servers: dict[str, _Places] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_ticket.values()))

    def get(self, ticket_id: str, call: str = "") -> Reservation | None:
        return self._by_ticket.get(ticket_id, {}).get(call)

    def calls(self, ticket_id: str) -> list[str]:
        """Return the calls of a ticket that have a place."""
        return list(self._by_ticket.get(ticket_id, ()))

    def tickets(self) -> list[str]:
        """Return the tickets that have a place."""
        return list(self._by_ticket)

    def load(self, server: str) -> tuple[int, int]:
        """Return (sequences, tokens) of the calls that have a place on ``server``."""
        calls = self._places(server).calls.values()
        return sum(place.sequences for place in calls), sum(place.tokens for place in calls)

    def last_pinned(self, server: str) -> float | None:
        """Return when the last call of a pinned version that has a place on ``server`` was placed; None without one."""
        return max((place.placed for place in self._places(server).calls.values() if place.pinned), default=None)

    def live(self, server: str, version: int) -> ServerLoad:
        """Return the load of ``server``, which serves ``version``, as an object that follows every change."""
        load = self._places(server).load
        load.version = version
        return load

    def report(self, server: str, sequences: int, tokens: int, asked: float) -> None:
        """Take over the load that ``server`` reports: running and queued sequences, and tokens in its cache.

        ``asked``: time of the question. Calls placed since are added, because their requests may not have arrived.
        """
        self._places(server).report(sequences, tokens, asked)

    def reserve(self, ticket_id: str, reservation: Reservation, call: str = "") -> None:
        """Place a call, releasing the place it had."""
        self.release_call(ticket_id, call)
        self._by_ticket.setdefault(ticket_id, {})[call] = reservation
        places = self._places(reservation.server)
        places.calls[ticket_id, call] = reservation
        places.count(reservation, 1)

    def release_call(self, ticket_id: str, call: str) -> Reservation | None:
        """Free a call's place and return it, None if it had no place."""
        calls = self._by_ticket.get(ticket_id, {})
        reservation = calls.pop(call, None)
        if reservation is None:
            return None
        if not calls:
            del self._by_ticket[ticket_id]
        places = self._servers[reservation.server]
        del places.calls[ticket_id, call]
        places.count(reservation, -1)
        return reservation

    def release(self, ticket_id: str) -> list[Reservation]:
        """Free the places of all calls of a ticket and return them."""
        freed = [self.release_call(ticket_id, call) for call in self.calls(ticket_id)]
        return [reservation for reservation in freed if reservation is not None]

    def release_server(self, server: str) -> int:
        """Free all places on a lost server. Returns their number."""
        held = list(self._places(server).calls)
        for ticket, call in held:
            self.release_call(ticket, call)
        del self._servers[server]
        return len(held)

    def release_all(self) -> None:
        for ticket in list(self._by_ticket):
            self.release(ticket)

    def _places(self, server: str) -> _Places:
        if server not in self._servers:
            self._servers[server] = _Places(ServerLoad(server, version=-1))  # ``live`` sets its version
        return self._servers[server]


# ---- it chooses a server for a request by registry, load, expected length and strategy
#
# every server ──verified, trusted, fresh, not drained──> routes ──strategy──> one server, with a reservation


@dataclass(frozen=True, slots=True)
class Exactly:
    """The one version that a completion of an evaluation may be sampled with."""

    version: int


#: Oldest version that a train ticket accepts, None for any within its bound; ``Exactly`` for evaluations; a pinned one.
Demand = int | Exactly | PublishedVersion | None


class Router:
    """Pure. ``reuse_versions``: versions by which a cached prefix may be older than a server's weights."""

    def __init__(
        self, servers: ServerRegistry, reservations: Reservations, strategy: Strategy, reuse_versions: int = 0
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
        pinned = isinstance(minimum, PublishedVersion)
        place = Reservation(name, request.n, tokens, serves, server.health.epoch, now, pinned)
        self._reservations.reserve(request.ticket_id, place, request.call)
        return ScheduleReply(name, server.address.url, serves, request.policy if pinned else "")

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
        if isinstance(minimum, PublishedVersion):
            return self._servers.samples(server, minimum)
        served, published = self._servers.current(server), self._servers.published
        return served is not None and published is not None and minimum <= served.version <= published.version

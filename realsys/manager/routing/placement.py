"""Placement: pure strategies that choose a server by the reserved loads.

A reservation belongs to a call of a ticket, because an agent may have several calls of one ticket under way. Scheduling
a call again moves its reservation. It is released exactly once: by the end of its call or its ticket, by a move, or by
the death of its server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Input of a strategy. ``previous``: the server whose cache holds the prefix, with the version of its weights.

    ``prefix``: the prompt's block hashes, shortest prefix first (``routing.prefix``); empty if unknown.
    """

    ticket_id: str
    sequences: int
    tokens: int  # upper bound: n * (prompt + completion limit)
    previous: str | None = None
    previous_version: int | None = None
    prefix: Sequence[int] = ()


@dataclass(slots=True)
class ServerLoad:
    """A routable server: the version that it serves, and its reserved load."""

    name: str
    version: int
    requests: int = 0  # sequences
    tokens: int = 0


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
    """The server with the fewest reserved sequences."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        return min(servers, key=_BY_REQUESTS).name


class LeastTokens:
    """The server with the fewest reserved tokens."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        return min(servers, key=_BY_TOKENS).name


_BY_REQUESTS = attrgetter("requests", "tokens", "name")
_BY_TOKENS = attrgetter("tokens", "requests", "name")


@dataclass(frozen=True, slots=True)
class Gate:
    """Limit on the load of a server that is preferred for its cache.

    It may have ``ratio`` times the tokens of the least loaded server plus ``slack`` requests of this size. Without it,
    a popular prefix overloads one server, as hashing prefixes to servers does.
    """

    ratio: float = 1.5
    slack: float = 4.0

    def limit(self, request: RouteRequest, least: int) -> float:
        """Return the most tokens that a preferred server may have reserved."""
        return self.ratio * least + self.slack * request.tokens


class StickyLeastLoaded:
    """The server that holds the tokens so far, while its weights are the same and the gate allows it.

    A weight update voids the cached prefix, so the ticket is then placed anew, on the least loaded server.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate or Gate()

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = min(servers, key=_BY_TOKENS)
        if request.previous is None:
            return least.name
        return _held_by_previous(request, servers, self._gate.limit(request, least.tokens)) or least.name


class PrefixAware:
    """Sticky; a ticket without a place goes where the longest part of its prompt was sent last, inside the gate.

    It assumes that a server caches the prefixes that were sent there under its present weights. A wrong assumption (its
    cache was full, a block hash collided) costs only a prefill. It remembers the ``capacity`` prefixes used last.
    """

    def __init__(self, gate: Gate | None = None, capacity: int = 65536) -> None:
        self._gate = gate or Gate()
        self._capacity = capacity
        self._holders: OrderedDict[int, dict[str, int]] = OrderedDict()  # prefix -> server -> version

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = min(servers, key=_BY_TOKENS)
        limit = self._gate.limit(request, least.tokens)
        chosen = _held_by_previous(request, servers, limit) or self._longest_match(request, servers, limit)
        name = chosen or least.name
        self._remember(request.prefix, next(server for server in servers if server.name == name))
        return name

    def _longest_match(self, request: RouteRequest, servers: Sequence[ServerLoad], limit: float) -> str | None:
        for prefix in reversed(request.prefix):
            holders = self._holders.get(prefix)
            if holders is not None:
                fit = [s for s in servers if s.tokens <= limit and holders.get(s.name) == s.version]
                if fit:
                    return min(fit, key=_BY_TOKENS).name
        return None

    def _remember(self, prefixes: Sequence[int], server: ServerLoad) -> None:
        for prefix in prefixes:
            self._holders.setdefault(prefix, {})[server.name] = server.version
            self._holders.move_to_end(prefix)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)


def _held_by_previous(request: RouteRequest, servers: Sequence[ServerLoad], limit: float) -> str | None:
    """Return the ticket's last server if it has the same weights and at most ``limit`` tokens."""
    for server in servers:
        if server.name == request.previous:
            held = server.version == request.previous_version and server.tokens <= limit
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call's place on a server. The server's ``epoch`` then tells old failure reports from new ones."""

    server: str
    sequences: int
    tokens: int
    version: int
    epoch: int


class Reservations:
    """All reservations, by ticket and call, and the load per server that they sum to."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, dict[str, Reservation]] = {}  # no ticket without a call
        self._loads: dict[str, ServerLoad] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_ticket.values()))

    def get(self, ticket_id: str, call: str = "") -> Reservation | None:
        return self._by_ticket.get(ticket_id, {}).get(call)

    def calls(self, ticket_id: str) -> list[str]:
        """Return the calls of a ticket that have a place."""
        return list(self._by_ticket.get(ticket_id, ()))

    def load(self, server: str) -> tuple[int, int]:
        """Return (sequences, tokens) reserved on ``server``."""
        load = self._loads.get(server)
        return (load.requests, load.tokens) if load else (0, 0)

    def live(self, server: str, version: int) -> ServerLoad:
        """Return the load of ``server``, which serves ``version``, as an object that follows every change."""
        load = self._loads.setdefault(server, ServerLoad(server, version))
        load.version = version
        return load

    def reserve(self, ticket_id: str, reservation: Reservation, call: str = "") -> None:
        """Place a call, releasing the place it had."""
        self.release_call(ticket_id, call)
        self._by_ticket.setdefault(ticket_id, {})[call] = reservation
        load = self._loads.get(reservation.server) or self.live(reservation.server, reservation.version)
        load.requests += reservation.sequences
        load.tokens += reservation.tokens

    def release_call(self, ticket_id: str, call: str) -> Reservation | None:
        """Free a call's place and return it, None if it had no place."""
        calls = self._by_ticket.get(ticket_id, {})
        reservation = calls.pop(call, None)
        if reservation is None:
            return None
        if not calls:
            del self._by_ticket[ticket_id]
        load = self._loads[reservation.server]
        load.requests -= reservation.sequences
        load.tokens -= reservation.tokens
        assert load.requests >= 0 and load.tokens >= 0, f"negative load: {load}"
        return reservation

    def release(self, ticket_id: str) -> list[Reservation]:
        """Free the places of all calls of a ticket and return them."""
        freed = [self.release_call(ticket_id, call) for call in self.calls(ticket_id)]
        return [reservation for reservation in freed if reservation is not None]

    def release_server(self, server: str) -> int:
        """Free all places on a lost server. Returns their number."""
        held = [(ticket, call) for ticket, call, reservation in self._all() if reservation.server == server]
        for ticket, call in held:
            self.release_call(ticket, call)
        self._loads.pop(server, None)
        return len(held)

    def release_all(self) -> None:
        for ticket in list(self._by_ticket):
            self.release(ticket)

    def _all(self) -> list[tuple[str, str, Reservation]]:
        return [(ticket, call, held) for ticket, calls in self._by_ticket.items() for call, held in calls.items()]

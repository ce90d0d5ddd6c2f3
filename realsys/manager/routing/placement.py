"""Which server a rollout generates on: pure strategies over the loads that the reservations add up to.

A reservation belongs to a call of a ticket: an agent may have several calls of one ticket under way. Scheduling a call
again moves its reservation. A reservation is released exactly once: by the end of its call or its ticket, by a move,
or by the death of its server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a strategy may look at. ``previous``: the server whose cache holds the prefix; with the weights it had.

    ``prefix``: the prompt's block hashes, shortest prefix first (``routing.prefix``); empty if not known.
    """

    ticket_id: str
    sequences: int
    tokens: int  # upper bound: n * (prompt + answer limit)
    previous: str | None = None
    previous_version: int | None = None
    prefix: Sequence[int] = ()


@dataclass(slots=True)
class ServerLoad:
    """A routable server with the version it serves and what is reserved on it."""

    name: str
    version: int
    requests: int = 0  # sequences
    tokens: int = 0


class Strategy(Protocol):
    """Chooses among at least one routable server."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str: ...


class RoundRobin:
    """Each in turn, by name, whatever its load."""

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
    """How much busier than the least loaded server one may be and still be preferred for its cache.

    Up to ``ratio`` times the least loaded one's tokens plus ``slack`` requests of this size. Without it a popular
    prefix piles up a hot spot, as hashing prefixes to servers does.
    """

    ratio: float = 1.5
    slack: float = 4.0

    def limit(self, request: RouteRequest, least: int) -> float:
        """The most tokens that a preferred server may have reserved."""
        return self.ratio * least + self.slack * request.tokens


class StickyLeastLoaded:
    """Stay on the server that holds the answers so far, while its weights are the same and the gate lets through.

    After a weight update the cached prefix is gone anyway, so the ticket is placed anew, on the least loaded server.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate or Gate()

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = min(servers, key=_BY_TOKENS)
        if request.previous is None:
            return least.name
        return _held_by_previous(request, servers, self._gate.limit(request, least.tokens)) or least.name


class PrefixAware:
    """Sticky; and a ticket without a place goes where the longest part of its prompt was sent last, inside the gate.

    What a server holds is guessed from what was sent there under the weights it serves now: a wrong guess (its cache
    was full, a block hash collided) costs a prefill, nothing else. Memory is bounded by ``capacity`` prefixes, the
    least recently used go first.
    """

    def __init__(self, gate: Gate | None = None, capacity: int = 65536) -> None:
        self._gate, self._capacity = gate or Gate(), capacity
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
    """The server that the ticket was on, if it still has the same weights and not more than ``limit`` tokens."""
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
    """By the name in ``config.manager.routing``."""
    return STRATEGIES[name]()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call's place on a server. ``epoch`` is the server's at that time, to tell old news of it from new."""

    server: str
    sequences: int
    tokens: int
    version: int
    epoch: int


class Reservations:
    """All reservations, by ticket and call, and the load per server that they add up to."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, dict[str, Reservation]] = {}  # no ticket without a call
        self._loads: dict[str, ServerLoad] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_ticket.values()))

    def get(self, ticket_id: str, call: str = "") -> Reservation | None:
        return self._by_ticket.get(ticket_id, {}).get(call)

    def calls(self, ticket_id: str) -> list[str]:
        """Calls of a ticket that have a place."""
        return list(self._by_ticket.get(ticket_id, ()))

    def load(self, server: str) -> tuple[int, int]:
        """(sequences, tokens) reserved on ``server``."""
        load = self._loads.get(server)
        return (load.requests, load.tokens) if load else (0, 0)

    def live(self, server: str, version: int) -> ServerLoad:
        """The load of ``server``, which serves ``version``, as an object that follows every change to it."""
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
        """Free a call's place; None if it had none (any more)."""
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
        """Free the places of all calls of a ticket."""
        freed = [self.release_call(ticket_id, call) for call in self.calls(ticket_id)]
        return [reservation for reservation in freed if reservation is not None]

    def release_server(self, server: str) -> int:
        """The server is gone: free all its places. Returns how many."""
        held = [(ticket, call) for ticket, call, reservation in self._all() if reservation.server == server]
        for ticket, call in held:
            self.release_call(ticket, call)
        self._loads.pop(server, None)
        return len(held)

    def release_all(self) -> None:
        """Free every place, because no ticket that was placed runs any more."""
        for ticket in list(self._by_ticket):
            self.release(ticket)

    def recount(self) -> dict[str, tuple[int, int]]:
        """Loads summed from scratch, for checks."""
        loads: dict[str, tuple[int, int]] = {}
        for _, _, reservation in self._all():
            sequences, tokens = loads.get(reservation.server, (0, 0))
            loads[reservation.server] = (sequences + reservation.sequences, tokens + reservation.tokens)
        return loads

    def _all(self) -> list[tuple[str, str, Reservation]]:
        return [(ticket, call, held) for ticket, calls in self._by_ticket.items() for call, held in calls.items()]

"""Which server a rollout generates on: pure strategies over the loads that the reservations add up to.

A reservation belongs to a ticket. Scheduling a ticket again moves it, and it is released exactly once: by the ticket's
end, by a move, or by the death of its server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a strategy may look at. ``previous``: the server whose cache holds the prefix; with the weights it had."""

    ticket_id: str
    sequences: int
    tokens: int  # upper bound: n * (prompt + answer limit)
    previous: str | None = None
    previous_version: int | None = None


@dataclass(slots=True)
class ServerLoad:
    """A routable server with what is reserved on it."""

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
        return min(servers, key=lambda server: (server.requests, server.tokens, server.name)).name


class LeastTokens:
    """The server with the fewest reserved tokens."""

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        return min(servers, key=lambda server: (server.tokens, server.requests, server.name)).name


class StickyLeastLoaded:
    """Stay on the server that holds the prefix while its weights are the same and it is not overloaded.

    After a weight update the cached prefix is gone anyway, so the ticket is placed anew. The gate is relative to the
    least loaded server: staying is allowed up to ``ratio`` times its tokens plus ``slack`` requests of this size.
    Hashing prefixes to servers instead piles up hot spots.
    """

    def __init__(self, ratio: float = 1.5, slack: float = 4.0) -> None:
        self._ratio, self._slack = ratio, slack
        self._place = LeastTokens()

    def choose(self, request: RouteRequest, servers: Sequence[ServerLoad]) -> str:
        least = min(server.tokens for server in servers)
        for server in servers:
            if server.name == request.previous and server.version == request.previous_version:
                if server.tokens <= self._ratio * least + self._slack * request.tokens:
                    return server.name
                break
        return self._place.choose(request, servers)


STRATEGIES: dict[str, type[RoundRobin | LeastRequests | LeastTokens | StickyLeastLoaded]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "sticky": StickyLeastLoaded,
}


def make_strategy(name: str) -> Strategy:
    """By the name in ``config.manager.routing``."""
    return STRATEGIES[name]()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A ticket's place on a server. ``epoch`` is the server's at that time, to tell old news of it from new."""

    server: str
    sequences: int
    tokens: int
    version: int
    epoch: int


class Reservations:
    """All reservations, and the load per server that they add up to."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, Reservation] = {}
        self._load: dict[str, list[int]] = {}  # server -> [sequences, tokens]

    def __len__(self) -> int:
        return len(self._by_ticket)

    def get(self, ticket_id: str) -> Reservation | None:
        return self._by_ticket.get(ticket_id)

    def load(self, server: str) -> tuple[int, int]:
        """(sequences, tokens) reserved on ``server``."""
        sequences, tokens = self._load.get(server, (0, 0))
        return sequences, tokens

    def reserve(self, ticket_id: str, reservation: Reservation) -> None:
        """Place a ticket, releasing the place it had."""
        self.release(ticket_id)
        self._by_ticket[ticket_id] = reservation
        load = self._load.setdefault(reservation.server, [0, 0])
        load[0] += reservation.sequences
        load[1] += reservation.tokens

    def release(self, ticket_id: str) -> Reservation | None:
        """Free a ticket's place; None if it had none (any more)."""
        reservation = self._by_ticket.pop(ticket_id, None)
        if reservation is not None:
            load = self._load[reservation.server]
            load[0] -= reservation.sequences
            load[1] -= reservation.tokens
            assert load[0] >= 0 and load[1] >= 0, f"negative load on {reservation.server}: {load}"
            if load == [0, 0]:
                del self._load[reservation.server]
        return reservation

    def release_server(self, server: str) -> int:
        """The server is gone: free all its places. Returns how many."""
        tickets = [ticket for ticket, reservation in self._by_ticket.items() if reservation.server == server]
        for ticket in tickets:
            self.release(ticket)
        return len(tickets)

    def recount(self) -> dict[str, tuple[int, int]]:
        """Loads summed from scratch, for checks."""
        loads: dict[str, tuple[int, int]] = {}
        for reservation in self._by_ticket.values():
            sequences, tokens = loads.get(reservation.server, (0, 0))
            loads[reservation.server] = (sequences + reservation.sequences, tokens + reservation.tokens)
        return loads

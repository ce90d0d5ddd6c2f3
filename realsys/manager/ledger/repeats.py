"""Allocations whose reply may have been lost: without them, their tickets would hold quota until the lease lapses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from realsys.types import Ticket

REMEMBERED = 8  # allocations per worker; a worker repeats only its last ones


class Repeats:
    """The tickets in the replies to each worker's last allocations."""

    def __init__(self) -> None:
        self.by_worker: dict[str, OrderedDict[str, list[Ticket]]] = {}

    def remember(self, worker: str, request_id: str, ticket: Ticket) -> None:
        """Add a ticket to the reply of an allocation. Without an id the worker does not repeat it."""
        if not request_id:
            return
        requests = self.by_worker.setdefault(worker, OrderedDict())
        requests.setdefault(request_id, []).append(ticket)
        while len(requests) > REMEMBERED:
            requests.popitem(last=False)

    def clear(self) -> None:
        self.by_worker.clear()

    def find(self, worker: str, request_id: str, still_running: Callable[[str, int], bool]) -> list[Ticket]:
        """Return the tickets of an earlier reply to this allocation that still run."""
        before = self.by_worker.get(worker, OrderedDict()).get(request_id, [])
        return [ticket for ticket in before if still_running(ticket.ticket_id, ticket.attempt)]

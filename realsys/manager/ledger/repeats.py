"""Allocations whose reply may have been lost: without them, their tickets would hold quota until the lease lapses.

A worker makes one allocation after the other, and repeats one until it has a reply. A try that it gave up may still
arrive later, when a broken network works again, or be held; the tickets of its reply would reach nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from realsys.types import Ticket

REMEMBERED = 8  # allocations per worker; a worker repeats only its last ones


class Repeats:
    """Each worker's last allocations, and the tickets in their replies."""

    def __init__(self) -> None:
        self.by_worker: dict[str, OrderedDict[str, list[Ticket]]] = {}

    def is_over(self, worker: str, request_id: str) -> bool:
        """Note an allocation. Returns True if the worker has made another one after it, so that nobody waits for it.

        Without an id the worker does not repeat it.
        """
        if not request_id:
            return False
        requests = self.by_worker.setdefault(worker, OrderedDict())
        if request_id in requests:
            return request_id != next(reversed(requests))
        requests[request_id] = []
        while len(requests) > REMEMBERED:
            requests.popitem(last=False)
        return False

    def remember(self, worker: str, request_id: str, ticket: Ticket) -> None:
        """Add a ticket to the reply of an allocation."""
        self.is_over(worker, request_id)
        if request_id:
            self.by_worker[worker][request_id].append(ticket)

    def forget_tickets(self) -> None:
        """Forget the tickets, which are over; the order of the allocations stays known."""
        for requests in self.by_worker.values():
            for tickets in requests.values():
                tickets.clear()

    def find(self, worker: str, request_id: str, still_running: Callable[[str, int], bool]) -> list[Ticket]:
        """Return the tickets of an earlier reply to this allocation that still run."""
        before = self.by_worker.get(worker, OrderedDict()).get(request_id, [])
        return [ticket for ticket in before if still_running(ticket.ticket_id, ticket.attempt)]

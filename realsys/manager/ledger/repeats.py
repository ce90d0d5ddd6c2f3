"""Allocations whose reply may have been lost, with the manager or the connection.

Without this their tickets would run nowhere until the lease lapses, and hold their share of the quota for that long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from realsys.types import Ticket

REMEMBERED = 8  # allocations per worker; a worker repeats only its last ones


class Repeats:
    """The tickets that each worker's last allocations were answered with."""

    def __init__(self) -> None:
        self._by_worker: dict[str, OrderedDict[str, list[Ticket]]] = {}

    def remember(self, worker: str, request_id: str, ticket: Ticket) -> None:
        if not request_id:
            return
        requests = self._by_worker.setdefault(worker, OrderedDict())
        requests.setdefault(request_id, []).append(ticket)
        while len(requests) > REMEMBERED:
            requests.popitem(last=False)

    def clear(self) -> None:
        self._by_worker.clear()

    def find(self, worker: str, request_id: str, still_running: Callable[[str, int], bool]) -> list[Ticket]:
        """What this allocation got before, as far as it still runs."""
        before = self._by_worker.get(worker, OrderedDict()).get(request_id, [])
        return [ticket for ticket in before if still_running(ticket.ticket_id, ticket.attempt)]

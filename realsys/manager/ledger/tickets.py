"""Tickets of the rollout ledger: their names, their states while they are open, the counts of all, lost replies."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:  # without numpy: `realsys why` reads ranges of tickets
    from realsys.types import Ticket

#: claimed: in a batch that is being trained; only its training or a roll-back changes it
OpenState = Literal["running", "finished", "waiting", "claimed"]
OPEN_STATES: tuple[OpenState, ...] = get_args(OpenState)


_LONGEST_RANGE = 1 << 20  # tickets; a longer one is damage, and would fill the memory


def ticket_name(number: int) -> str:
    """Return the id of a ticket. Lexical order of ids is grant order."""
    return f"{number:010d}"


def ticket_number(ticket_id: str) -> int | None:
    """Return the number in a ticket id, None if the id has another form."""
    return int(ticket_id) if len(ticket_id) == 10 and ticket_id.isascii() and ticket_id.isdigit() else None


def ticket_ranges(ticket_ids: Sequence[str]) -> str:
    """Return ticket ids, in their order, in few characters: ``16-23,25``. ``tickets_in`` reverses it."""

    def run_of(place: tuple[int, str]) -> int | str:
        number = ticket_number(place[1])
        return f"{place[0]}" if number is None else number - place[0]

    runs = [[ticket_id for _, ticket_id in run] for _, run in groupby(enumerate(ticket_ids), run_of)]
    return ",".join("-".join(_short(ticket_id) for ticket_id in dict.fromkeys((run[0], run[-1]))) for run in runs)


def _short(ticket_id: str) -> str:
    number = ticket_number(ticket_id)
    return ticket_id if number is None else str(number)


def tickets_in(ranges: str) -> Iterator[str]:
    """Yield the ids of ``ticket_ranges``. A word that is no range, or longer than any batch, is yielded as it is."""
    for word in ranges.split(",") if ranges else ():
        first, _, last = word.partition("-")
        numbers = len(word) < 40 and all(n.isascii() and n.isdigit() for n in (first, last or first))
        if numbers and int(last or first) - int(first) < _LONGEST_RANGE:
            yield from map(ticket_name, range(int(first), int(last or first) + 1))
        else:
            yield word


def label(text: str) -> str:
    """Return the countable part of a reason: before its first colon, one line, at most 48 characters."""
    return " ".join(text.split(":", 1)[0].split())[:48] or "unnamed"


@dataclass(slots=True)
class OpenTicket:
    """A ticket that has not ended."""

    ticket_id: str
    prompt_index: int
    attempt: int
    worker: str
    incarnation: str
    version: int
    news_at: float  # last news; start of the lease, and of the time to arrive once it has finished
    failures: int = 0
    state: OpenState = "running"
    request: str = ""  # id of the allocation
    weights: int = -1  # oldest version that may sample it, by its place in N when it was granted


@dataclass(slots=True)
class LedgerCounts:
    """Numbers of tickets by state, of drops by reason and of reissues by cause."""

    inherited: int = 0  # groups trained before the resumed checkpoint; they have no ticket here
    granted: int = 0  # tickets
    attempts: int = 0
    starts: int = 0  # starts of a trainer, each with a roll-back
    open: dict[OpenState, int] = field(default_factory=lambda: dict.fromkeys(OPEN_STATES, 0))
    trained: int = 0
    dropped: int = 0
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    reissued_by_cause: Counter[str] = field(default_factory=Counter)

    @property
    def counted(self) -> int:
        """N of ``admission`` without the candidate."""
        return self.inherited + sum(self.open.values()) - self.open["waiting"] + self.trained

    def filtered(self) -> dict[str, int]:
        """Return the groups that workers filtered out, by reason."""
        prefix = "filtered "
        drops = self.dropped_by_reason.items()
        return {reason.removeprefix(prefix): n for reason, n in drops if n and reason.startswith(prefix)}

    def by_state(self) -> dict[str, int]:
        """Return the tickets in each state; the sum is ``granted``."""
        states: dict[str, int] = {state: number for state, number in self.open.items()}  # noqa: C416 (wider key type)
        return states | {"trained": self.trained, "dropped": self.dropped}


# ---- lost replies
#
# Allocations whose reply may have been lost: without them, their tickets would hold quota until the lease lapses.
#
# A worker makes one allocation after the other, and repeats one until it has a reply. A try that it gave up may still
# arrive later, when a broken network works again, or be held; the tickets of its reply would be lost.


REMEMBERED = 8  # allocations per worker; a worker repeats only its last ones


class Repeats:
    """Each worker's last allocations, and the tickets in their replies."""

    def __init__(self) -> None:
        self.by_worker: dict[str, OrderedDict[str, list[Ticket]]] = {}

    def is_over(self, worker: str, request_id: str) -> bool:
        """Note an allocation. Returns True if the worker has made another one after it, which ends this one.

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

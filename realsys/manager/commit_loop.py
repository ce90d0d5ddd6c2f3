"""The commit loop around ManagerState: clock, journal, held calls. Everything runs on one event loop.

    call ──> decide (pure) ──> append events ──> wake held calls ──> fsync where the operation asks for it ──> reply
                 ^                                    │
                 └── not settled: held ───────────────┘

A wake is as small as the change: an allocation is woken only if there is a ticket for it, a schedule request only if a
server has changed, the tasks of a server only if that server has something to decide.

No code here awaits between reading the state and changing it, so no lock is needed (``no-wait-for-the-dead``).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from realsys.cluster.journal import Compactor
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import LedgerError
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import AllocateReply, NoServer
from realsys.manager.operations import Operation, Reply, Request
from realsys.manager.routing.rollout_workers import incarnation_of
from realsys.observe import spans

IsGone = Callable[[], Awaitable[bool]]
T = TypeVar("T")


class WakeUp:
    """Wakes everyone who took a ``ticket`` before ``fire``. Take it before looking at the state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return an event that the next ``fire`` sets."""
        return self._event

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class HeldAllocations:
    """Allocations that wait for tickets, in the order of their arrival.

    A woken one has its turn until its next decision; until then its ticket counts as taken. If it gets none, it keeps
    its place. Take a ``place`` once per call, and end with ``decided``.
    """

    def __init__(self) -> None:
        self._places = itertools.count()
        self._waiting: dict[int, Callable[[], None]] = {}  # place -> what wakes the call
        self._turns: set[int] = set()  # woken, and not decided yet

    def __len__(self) -> int:
        return len(self._waiting) + len(self._turns)

    @property
    def turns(self) -> int:
        """Number of allocations that have been woken, and have not decided yet."""
        return len(self._turns)

    def place(self) -> int:
        return next(self._places)

    async def wait(self, place: int, timeout_s: float) -> None:
        """Wait for a turn, or until the time is over."""
        event = asyncio.Event()
        self.hold(place, event.set)
        try:
            await wait_for(event, timeout_s)
        finally:
            self.leave(place)

    def hold(self, place: int, wake: Callable[[], None]) -> None:
        """Let a call wait; ``wake`` is called when it has a turn."""
        self._waiting[place] = wake

    def leave(self, place: int) -> bool:
        """End the wait of a call. Returns False if it did not wait."""
        return self._waiting.pop(place, None) is not None

    def wake(self, tickets: int) -> None:
        """Give a turn to as many allocations as there are ``tickets``, longest wait first."""
        for place in heapq.nsmallest(max(0, tickets - len(self._turns)), self._waiting):
            self._turns.add(place)
            self._waiting.pop(place)()

    def decided(self, place: int) -> bool:
        """End the turn of a call. Returns True if it had one."""
        had = place in self._turns
        self._turns.discard(place)
        return had


async def wait_for(event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until ``event`` is set or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def steady_clock() -> Callable[[], float]:
    """Return a clock of unix seconds that only advances.

    A wall clock that is set must neither end all leases nor prolong them.
    """
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


async def _stays() -> bool:
    return False


class ManagerService:
    """Runs operations on the state. ``fatal`` gets the error that must end the process."""

    def __init__(
        self,
        state: ManagerState,
        journal: Journal,
        *,
        check_alive: CheckAlive = unleased,
        compact_above: int = 64 << 20,
    ) -> None:
        """``compact_above``: bytes of the journal; see ``keep_compact``."""
        self.state = state
        self.journal = journal
        self.clock = steady_clock()
        self.changed = WakeUp()  # a server or the routes
        self.grants = HeldAllocations()
        self._servers: defaultdict[str, WakeUp] = defaultdict(WakeUp)
        self._revision = -1  # revision of the servers at the last wake
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closing = False
        self.compaction = asyncio.Event()  # the journal has grown beyond its limit
        self._check_alive = check_alive
        self._compactor = Compactor(journal, compact_above)

    def close(self) -> None:
        """Answer the held calls, so that the server can stop."""
        self.closing = True
        self.changed.fire()
        self.grants.wake(len(self.grants))

    def server(self, name: str) -> WakeUp:
        """Return the signal that a server's tasks have something to decide."""
        return self._servers[name]

    async def call(self, operation: Operation[Request, Reply], request: Request, is_gone: IsGone = _stays) -> Reply:
        """Run one operation. ``is_gone`` tells if the caller has disconnected.

        Raises Refusal, and LedgerError when the journal cannot be written: then the process must end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + operation.held_s(request)
        caller = operation.caller(request)
        caller_incarnation = incarnation_of(caller, self.state.workers)
        place = self.grants.place()
        try:
            while True:
                self.grants.decided(place)
                changed = self.changed.ticket()
                reply = self._decide(operation, request)
                left = deadline - loop.time()
                settled = not isinstance(reply, NoServer) and operation.settled(reply)
                if settled or left <= 0 or self.closing:
                    break
                await (self.grants.wait(place, left) if operation.grants else wait_for(changed, left))
                # A ticket granted to a caller that left would run until its lease lapses. A suspended caller keeps its
                # connection, but not its heartbeat.
                if await is_gone():
                    break
                if caller_incarnation and incarnation_of(caller, self.state.workers) != caller_incarnation:
                    break
        finally:
            if self.grants.decided(place):
                self._wake()  # the caller has left: the next one has the turn
        if isinstance(reply, NoServer):
            raise reply
        if isinstance(reply, AllocateReply):
            for ticket in reply.tickets:
                spans.mark("grant", ticket.unit, worker=caller, version=ticket.version)
        if operation.syncs(request):
            await self._sync()
        return reply

    def _decide(self, operation: Operation[Request, Reply], request: Request) -> Reply | NoServer:
        if self.fatal.done():  # memory is ahead of the journal: a repeated call would get unrecorded tickets
            raise LedgerError(f"this manager has to end: {self.fatal.exception()}")
        self.state.asking, self.state.promised = len(self.grants), self.grants.turns
        try:
            reply: Reply | NoServer = operation.decide(self.state, request, self.clock())
        except NoServer as refusal:
            reply = refusal
        self.commit()
        self._wake()
        return reply

    def settle(self, change: T) -> T:
        """Commit a change that name store, clock or a server made, and wake what waits for it. Returns ``change``."""
        self.commit()
        self._wake()
        return change

    def _wake(self) -> None:
        """Wake the tasks and the calls whose decision may be another one now."""
        for name in self.state.take_due():
            self._servers[name].fire()
        if self._revision != self.state.servers.revision:
            self._revision = self.state.servers.revision
            self.changed.fire()
        if self.grants:
            self.grants.wake(self.state.grantable())

    def commit(self) -> None:
        """Append the events in the outbox to the journal.

        If that fails the process must end, because its memory is ahead of the journal.
        """
        events, self.state.outbox = self.state.outbox, []
        if events:
            self._check_alive()  # a successor may be writing the journal already
        try:
            self.journal.append(events)
        except LedgerError as error:
            self._end(error)
            raise
        if self._compactor.due:
            self.compaction.set()

    async def keep_compact(self) -> None:
        """Compact the journal in the background whenever it has grown too large, until cancelled."""
        while True:
            await self.compaction.wait()
            self.compaction.clear()
            if self._compactor.due:
                await self._compactor.compact(lambda: self.state.snapshot(self.clock()), self._check_alive)

    async def _sync(self) -> None:
        """Make the journal survive the machine.

        If that fails the process must end: the next fsync may succeed although this one's data has been discarded.
        """
        try:
            await asyncio.to_thread(self.journal.sync)
        except LedgerError as error:
            self._end(error)
            raise

    def _end(self, error: LedgerError) -> None:
        if not self.fatal.done():
            self.fatal.set_exception(error)

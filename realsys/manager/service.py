"""The commit loop around ManagerState: clock, journal, held calls. Everything runs on one event loop.

    call ──> decide (pure) ──> append events ──> wake held calls ──> fsync where the operation asks for it ──> reply
                 ^                                    │
                 └────────── not settled: held until something changes

No code here awaits between reading the state and changing it, so no lock is needed (``no-wait-for-the-dead``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import LedgerError
from realsys.manager.ledger.compaction import Compactor
from realsys.manager.ledger.journal import Journal
from realsys.manager.operations import Operation, Reply, Request
from realsys.manager.refusals import NoServer
from realsys.manager.routing.rollout_workers import incarnation_of
from realsys.manager.state import ManagerState

IsGone = Callable[[], Awaitable[bool]]
T = TypeVar("T")


class Signal:
    """Wakes everyone who took a ``ticket`` before ``fire``. Take it before looking at the state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Return an event that the next ``fire`` sets."""
        return self._event

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


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
        self.changed = Signal()
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closing = False
        self.compaction = asyncio.Event()  # the journal has grown beyond its limit
        self._check_alive = check_alive
        self._compactor = Compactor(journal, compact_above)

    def close(self) -> None:
        """Answer the held calls, so that the server can stop."""
        self.closing = True
        self.changed.fire()

    async def call(self, operation: Operation[Request, Reply], request: Request, is_gone: IsGone = _stays) -> Reply:
        """Run one operation. ``is_gone`` tells if the caller has disconnected.

        Raises Refusal, and LedgerError when the journal cannot be written: then the process must end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + operation.held_s(request)
        caller = operation.caller(request)
        caller_incarnation = incarnation_of(caller, self.state.workers)
        while True:
            changed = self.changed.ticket()
            reply = self._decide(operation, request)
            left = deadline - loop.time()
            settled = not isinstance(reply, NoServer) and operation.settled(reply)
            if settled or left <= 0 or self.closing:
                break
            await wait_for(changed, left)
            # A ticket granted to a caller that left would run until its lease lapses. A suspended caller keeps its
            # connection, but not its heartbeat.
            if await is_gone():
                break
            if caller_incarnation and incarnation_of(caller, self.state.workers) != caller_incarnation:
                break
        if isinstance(reply, NoServer):
            raise reply
        if operation.syncs(request):
            await self._sync()
        return reply

    def _decide(self, operation: Operation[Request, Reply], request: Request) -> Reply | NoServer:
        wakes = operation.wakes(self.state, request)
        try:
            reply: Reply | NoServer = operation.decide(self.state, request, self.clock())
        except NoServer as refusal:
            reply = refusal
        self.commit()
        if wakes:
            self.changed.fire()
        return reply

    def settle(self, change: T) -> T:
        """Commit a change that name store or clock made, and wake held calls if ``change`` is true. Returns it."""
        self.commit()
        if change:
            self.changed.fire()
        return change

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

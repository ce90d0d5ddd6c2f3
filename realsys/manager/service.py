"""The shell around ManagerState: clock, journal, long-polls. Everything runs on one event loop.

    HTTP handler ──> ManagerService ──> ManagerState (pure)
                         │  └──> Journal: the events of a call are on file before the call is answered
                         └──> changed: wakes held allocations and the weight roll-out

Nothing here awaits between looking at the state and changing it, so no lock is needed and none is held across I/O.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from realsys.cluster.fence import CheckAlive, unleased
from realsys.errors import LedgerError
from realsys.manager.evaluations import Evaluation
from realsys.manager.ledger.compaction import Compactor
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import (
    AllocateReply,
    AllocateRequest,
    ClaimReply,
    ClaimRequest,
    DataPosition,
    EvaluateRequest,
    FinishReply,
    FinishRequest,
    RollBackReply,
    RollBackRequest,
    ScheduleReply,
    ScheduleRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.refusals import NoServer, NotRunning, OlderTraining
from realsys.manager.routing.rollout_workers import incarnation_of
from realsys.manager.state import ManagerState
from realsys.types import PublishedVersion

MAX_WAIT_S = 10.0  # an allocation is never held longer
SCHEDULE_WAIT_S = 2.0  # a request for a server waits this long for one to become routable

Gone = Callable[[], Awaitable[bool]]


class Signal:
    """Something changed: wakes everyone who took a ``ticket`` before. Take it before looking at the state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        return self._event

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def wait_for(event: asyncio.Event, timeout_s: float | None) -> None:
    """Until ``event`` is set or the time is over, whichever is first."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def steady_clock() -> Callable[[], float]:
    """Unix seconds that only go forward: a wall clock that is set must neither lapse all leases nor hold them."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class ManagerService:
    """The calls of the manager as coroutines. ``fatal`` gets the error that must end the process."""

    def __init__(
        self,
        state: ManagerState,
        journal: Journal,
        *,
        clock: Callable[[], float] | None = None,
        check_alive: CheckAlive = unleased,
        compact_above: int = 64 << 20,
    ) -> None:
        """``compact_above``: bytes of the journal; see ``keep_compact``."""
        self.state, self.clock, self._check_alive = state, clock or steady_clock(), check_alive
        self.changed = Signal()
        self.started = self.clock()
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closing = False
        self.journal = journal
        self.compaction = asyncio.Event()  # the journal has grown beyond its limit
        self._compactor = Compactor(journal, compact_above)

    def close(self) -> None:
        """Answer what is held, so that the server can stop."""
        self.closing = True
        self.changed.fire()

    def commit(self) -> None:
        """Put this turn's events on file. If that fails the process must end: its memory is ahead of the journal."""
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

    async def _sync(self) -> None:
        """What is on file survives the machine. If that fails the process must end: the next fsync may succeed
        though what this one was to write has been dropped.
        """
        try:
            await asyncio.to_thread(self.journal.sync)
        except LedgerError as error:
            self._end(error)
            raise

    def _end(self, error: LedgerError) -> None:
        if not self.fatal.done():
            self.fatal.set_exception(error)

    async def keep_compact(self) -> None:
        """Compacts the journal whenever it has grown too large, beside everything else; until it is cancelled."""
        while True:
            await self.compaction.wait()
            self.compaction.clear()
            if self._compactor.due:
                await self._compactor.compact(lambda: self.state.snapshot(self.clock()), self._check_alive)

    async def allocate(self, request: AllocateRequest, gone: Gone) -> AllocateReply:
        """Held up to ``wait_s``; woken by every change that may let something through."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_s, MAX_WAIT_S)
        asked_by = incarnation_of(request.worker, self.state.workers)
        while True:
            changed = self.changed.ticket()
            reply = self.state.allocate(request, self.clock())
            if reply.tickets:
                self.commit()
                return reply
            left = deadline - loop.time()
            if left <= 0 or self.closing:
                return reply
            await wait_for(changed, left)
            # A ticket granted to a caller that left would run until its lease lapses. One that is suspended keeps its
            # connection, but not its heartbeat.
            if await gone() or (asked_by and incarnation_of(request.worker, self.state.workers) != asked_by):
                return reply

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply | NoServer | NotRunning:
        """A server, at once or as soon as one is routable within ``SCHEDULE_WAIT_S``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SCHEDULE_WAIT_S
        while True:
            changed = self.changed.ticket()
            quarantines = request.failed_server is not None
            reply = self.state.schedule(request, self.clock())
            if quarantines:
                request.failed_server = None  # reported once
                self.changed.fire()
            left = deadline - loop.time()
            if not isinstance(reply, NoServer) or left <= 0 or self.closing:
                return reply
            await wait_for(changed, left)

    def finish(self, request: FinishRequest) -> FinishReply:
        before = self.state.ledger.counted
        reply = self.state.finish(request, self.clock())
        self.commit()
        # An accepted group frees no quota, so nobody needs to wake up for it, unless a server is waiting to be drained.
        if self.state.ledger.counted != before or reply.retry or not self.state.settings.interruptible:
            self.changed.fire()
        return reply

    def claim(self, request: ClaimRequest) -> ClaimReply | OlderTraining:
        """Raises ValueError for a ticket that was never granted."""
        reply = self.state.claim(request, self.clock())
        self.commit()
        return reply

    async def trained(self, request: TrainedRequest) -> TrainedReply | OlderTraining:
        """Raises ValueError for a call that contradicts itself or the ledger."""
        reply = self.state.trained(request, self.clock())
        if isinstance(reply, OlderTraining):
            return reply
        self.commit()
        self.changed.fire()
        if (
            request.trained or request.dropped
        ):  # told again, too: the first time may have ended before it was on the disk
            await self._sync()
        return reply

    async def roll_back(self, request: RollBackRequest) -> RollBackReply | OlderTraining:
        """Survives the death of the machine once answered: the incarnation that it fences off must stay so.

        Raises ValueError for a version that cannot be gone back to.
        """
        reply = self.state.roll_back(request, self.clock())
        if isinstance(reply, OlderTraining):
            return reply
        self.commit()
        self.changed.fire()
        await self._sync()
        return reply

    async def position(self) -> DataPosition:
        """Where in the data training is; on the disk, for the checkpoint that is to hold it."""
        position = self.state.ledger.position()
        await self._sync()
        return position

    def evaluate(self, request: EvaluateRequest) -> Evaluation | OlderTraining:
        evaluation = self.state.evaluate(request, self.clock())
        if isinstance(evaluation, OlderTraining):
            return evaluation
        self.commit()
        self.changed.fire()
        return evaluation

    def publish(self, published: PublishedVersion) -> bool:
        fresh = self.state.publish(published)
        if fresh:
            self.changed.fire()
        return fresh

    def observe_workers(self, heartbeats: dict[str, str]) -> list[str]:
        lost = self.state.observe_workers(heartbeats, self.clock())
        self.commit()
        if lost:
            self.changed.fire()
        return lost

    def expire(self) -> list[str]:
        lost = self.state.expire(self.clock())
        self.commit()
        if lost:
            self.changed.fire()
        return lost

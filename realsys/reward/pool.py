"""VerifierPool: verifiers in separate processes, so that a slow, hung or crashing one stalls nothing.

    verify ──> queue ──up to 64 items of one verifier──> idle process ──outcomes──> Verdict of each item
                 ^                                            │
                 ├── items behind the one that ended it ──────┤ killed and replaced
                 └── an item without a verdict, once ─────────┘ the second time: RewardError

`error-is-not-data`: an error is never a verdict, and it fails one item only. An item has no verdict if its verifier
raises, returns something else, exceeds a limit, or ends its process. It is judged once more, behind all that wait:
the cause may have been the machine. Items behind it go to a fresh process. The limits begin when its process begins
it. All items of a trip fail only if the process cannot start or cannot load the verifier (NoVerifierError).

A verifier may declare that an item over the limit of CPU time is wrong (``contract.declare``). That limit does not
depend on the load of the machine, so such an item is judged once. ``failures`` counts these items and those without a
verdict, by cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realsys.errors import NoVerifierError, RealsysError, RewardError
from realsys.reward.verifier_process import ItemLimits, VerifierProcess, VerifierWork
from realsys.reward.verifier_protocol import CPU_TIME, MAX_ITEMS, REFUSED, Outcome, encoded
from realsys.reward.verifiers.contract import Item, Verdict

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # enough to start Python and to import a verifier's libraries on a busy machine
MEMORY_BYTES = 4 << 30  # address space of a process; a verifier that wants more gets MemoryError
#: the verdict on a completion over the limit of CPU time, whose verifier declares that it is wrong: this very object
OVER_LIMIT = Verdict(correct=False)
_CLOSED = "the verifier pool is closed"


@dataclass(eq=False, slots=True)
class _Call:
    """One item, and the future of its verdict. ``again``: it has been judged once, without a verdict."""

    work: VerifierWork
    item: bytes
    future: asyncio.Future[Verdict]
    again: bool = False

    def succeed(self, verdict: Verdict) -> None:
        if not self.future.done():  # the caller may have been cancelled
            self.future.set_result(verdict)

    def fail(self, error: RealsysError) -> None:
        if not self.future.done():  # the caller may have been cancelled
            self.future.set_exception(error)


class VerifierPool:
    """``processes`` verifiers at a time; ``limits`` of one item. For one event loop."""

    def __init__(
        self,
        processes: int,
        limits: ItemLimits,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        judgements: int = 2,
    ) -> None:
        """``arguments``: verifier -> its keyword arguments. ``judgements``: 1 leaves the second one to the caller."""
        if processes < 1:
            raise ValueError(f"a verifier pool needs at least one process, got {processes}")
        self.restarts = 0  # processes replaced since the start
        self._arguments = arguments or {}
        self._tally = FailureTally()
        self._processes = processes
        self._limits = limits
        self._once = judgements == 1
        self._queue: dict[VerifierWork, deque[_Call]] = {}  # the first key is served next
        self._idle: list[VerifierProcess | None] = [None] * processes  # None: to be started when needed
        self._running: set[VerifierProcess] = set()
        self._workers: set[asyncio.Task[None]] = set()  # one for each process that is not idle
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of items that no process has taken yet."""
        return sum(not call.future.done() for calls in self._queue.values() for call in calls)

    @property
    def undecided(self) -> int:
        """Number of items without a verdict since the start."""
        return self._tally.undecided

    @property
    def failures(self) -> Mapping[str, int]:
        """Items since ``take_failures`` without a verdict or over a limit, by cause."""
        return self._tally.failures

    def take_failures(self) -> dict[str, int]:
        """Return the failures since the last call, by cause."""
        return self._tally.take()

    async def verify(self, name: str, item: Item) -> Verdict:
        """Judge one completion with the verifier ``name``. Raises RewardError if two judgements give no verdict.

        Items that are given in one turn of the event loop cost one round trip together.
        """
        return await self.judge(VerifierWork(name), encoded(name, item))

    async def check_answer(self, name: str, item: Item) -> str | None:
        """Return why the verifier ``name`` cannot use the reference of an item; None if it can.

        A check that raises, hangs or dies is such a reason, too. Raises NoVerifierError.
        """
        try:
            await self.judge(VerifierWork(name, check=True), encoded(name, item))
        except RewardError as error:
            return str(error)
        return None

    async def judge(self, work: VerifierWork, item: bytes) -> Verdict:
        """Do the work on an encoded item, with the errors of ``verify``."""
        if self._closed:
            raise NoVerifierError(_CLOSED)
        call = _Call(work, item, asyncio.get_running_loop().create_future(), again=self._once)
        self._queue.setdefault(work, deque()).append(call)
        if self._idle:
            # The task begins behind all callers that are ready to run in this turn of the event loop.
            worker = asyncio.create_task(self._work(self._idle.pop()))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return await call.future

    async def close(self) -> None:
        """Kill the processes. Items that are being judged or that wait get a RewardError."""
        self._closed = True
        for child in self._running:
            child.process.kill()
        for calls in self._queue.values():
            self._fail(calls, _CLOSED)
        self._queue.clear()
        if self._workers:
            await asyncio.wait(self._workers)
        for child in list(self._running):
            await self._discard(child)

    async def _work(self, child: VerifierProcess | None) -> None:
        """Judge what waits, trip after trip, until nothing waits."""
        try:
            while calls := self._take():
                given, child = child, None  # if the trip raises, its process is gone
                child = await self._trip(given, calls)
                await asyncio.sleep(0)  # callers that have their verdicts now may ask for more, in the same trip
        finally:
            self._idle.append(child)

    def _take(self) -> deque[_Call]:
        """Take items of one verifier in their order: one process's share of them. Empty: nothing waits."""
        while self._queue:
            work, waiting = next(iter(self._queue.items()))
            del self._queue[work]
            alive = [call for call in waiting if not call.future.done()]  # done: its caller was cancelled
            share = min(MAX_ITEMS, -(-len(alive) // self._processes))
            if share < len(alive):
                self._queue[work] = deque(alive[share:])  # behind the other verifiers
            if alive:
                return deque(alive[:share])
        return deque()

    def _put_back(self, calls: deque[_Call]) -> None:
        if self._closed:
            self._fail(calls, _CLOSED)
        elif calls:
            self._queue.setdefault(calls[0].work, deque()).extendleft(reversed(calls))

    async def _trip(self, child: VerifierProcess | None, calls: deque[_Call]) -> VerifierProcess | None:
        """Have a process judge the calls. Those that it did not get to are put back. Returns the process, if usable."""
        keep = False
        try:
            if child is not None and child.has_ended():
                await self._discard(child)
                child = None
            if child is None:
                child = await self._start()
            keep = await self._load(child, calls)
            if keep and calls:
                keep = await self._judge(child, calls)
        except NoVerifierError as error:
            self._fail(calls, str(error))
        except BaseException as error:
            self._fail(calls, f"the verifier pool failed: {type(error).__name__}: {error}")
            raise
        finally:
            if child is not None and not keep:
                await self._discard(child)
            self._put_back(calls)
        return child if keep else None

    async def _start(self) -> VerifierProcess:
        if self._closed:
            raise NoVerifierError(_CLOSED)
        try:
            child = VerifierProcess(MEMORY_BYTES)
        except OSError as error:
            raise NoVerifierError(f"a verifier process cannot be started: {error}") from error
        self._running.add(child)
        try:
            await child.open(START_TIMEOUT_S)
        except RewardError as error:
            await self._discard(child)
            raise NoVerifierError(str(error)) from error
        except BaseException:
            await self._discard(child)
            raise
        return child

    async def _load(self, child: VerifierProcess, calls: deque[_Call]) -> bool:
        """Have the verifier loaded, or fail all calls. Returns True if the process can be used."""
        name = calls[0].work.name
        try:
            refused = await child.load(name, self._arguments.get(name, {}), START_TIMEOUT_S)
        except RewardError as error:
            self._fail(calls, str(error))
            return False
        if refused is None:
            return True
        self._fail(calls, f"verifier {name} cannot be loaded: {refused.message}")
        return not refused.spent

    async def _judge(self, child: VerifierProcess, calls: deque[_Call]) -> bool:
        """Settle calls in their order. Returns True if the process can be used further."""

        def deliver(outcomes: list[Outcome]) -> None:
            for outcome in outcomes:
                call = calls.popleft()
                if isinstance(outcome, Verdict):
                    self._tally.decide()
                    call.succeed(outcome)
                elif outcome.cause == REFUSED:
                    call.fail(RewardError(outcome.message, REFUSED))
                else:
                    self._no_verdict(call, RewardError(f"verifier {work.name}: {outcome.message}", outcome.cause))

        work = calls[0].work
        try:
            return await child.judge(work, [call.item for call in calls], self._limits, deliver)
        except RewardError as error:
            log.warning("%s; it is replaced, and %d more items go to another process", error, len(calls) - 1)
            if calls:  # the first one without an outcome was being judged
                call = calls.popleft()
                if error.cause == CPU_TIME and not work.check and child.wrong_over_limit(work.name):
                    self._over_limit(call, error)
                else:
                    self._no_verdict(call, error)
            return False

    def _over_limit(self, call: _Call, error: RewardError) -> None:
        """Judge an item over the limit of CPU time as wrong. Many in a row mean that the limit is too low."""
        if (hopeless := self._tally.fail(error)) is not None:
            call.fail(hopeless)
        else:
            call.succeed(OVER_LIMIT)

    def _no_verdict(self, call: _Call, error: RewardError) -> None:
        """Queue an item behind all others to be judged again; fail it if this was the second time."""
        if not call.again and not self._closed:
            call.again = True
            self._queue.setdefault(call.work, deque()).append(call)
            return
        if self._closed:
            call.fail(error)
            return
        self._tally.undecided += 1
        call.fail(self._tally.fail(error) or error)

    def _fail(self, calls: deque[_Call], problem: str) -> None:
        while calls:
            calls.popleft().fail(NoVerifierError(problem))

    async def _discard(self, child: VerifierProcess) -> None:
        if child in self._running:
            self._running.discard(child)
            self.restarts += not self._closed
        await child.kill()


# ---- failures by cause


#: items in a row without a verdict after which the verifier counts as defective: a group could be trained with its
#: cut-off completions only, and the run would continue with them
HOPELESS = 64


class FailureTally:
    """Counts of one RolloutWorker.

    undecided  items without a verdict since the start
    failures   cause -> items since ``take``: those without a verdict, and those over a limit
    """

    def __init__(self) -> None:
        self.undecided = 0
        self.failures: Counter[str] = Counter()
        self._in_a_row = 0  # failures since the last verdict

    def decide(self) -> None:
        """Count an item with a verdict."""
        self._in_a_row = 0

    def fail(self, error: RewardError) -> NoVerifierError | None:
        """Count a failure of an item. After many in a row the verifier or its limit is to blame, not the item.

        Then the attempt must fail with the error that is returned, so that the run ends by name.
        """
        self.failures[error.cause] += 1
        self._in_a_row += 1
        if self._in_a_row < HOPELESS:
            return None
        return NoVerifierError(f"{self._in_a_row} completions in a row had no verdict; the last one: {error}")

    def take(self) -> dict[str, int]:
        """Return the failures since the last call, by cause."""
        failures, self.failures = dict(self.failures), Counter()
        return failures

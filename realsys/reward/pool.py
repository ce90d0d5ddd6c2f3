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

import abc
import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec
import psutil

from realsys.cluster.children.child_process import SocketChild, how_it_ended, is_logged
from realsys.cluster.process import own_environment
from realsys.config.doors import VERIFIER
from realsys.config.evaluation_sets import verifier_arguments
from realsys.config.schema import Config
from realsys.config.schema_rollout import RewardConfig
from realsys.errors import MALFORMED, NoVerifierError, RealsysError, RewardError, WaitTimeout
from realsys.reward.verifier_protocol import (
    CPU_TIME,
    ELAPSED,
    MAX_ITEMS,
    MAX_REPLY,
    REFUSED,
    BatchDone,
    JournalReader,
    Loaded,
    Outcome,
    Reply,
    VerifierBatch,
    VerifierWork,
    encoded,
    line,
)
from realsys.reward.verifiers.contract import Item, Verdict

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # enough to start Python and to import a verifier's libraries on a busy machine
#: the verdict on a completion over the limit of CPU time, whose verifier declares that it is wrong: this very object
OVER_LIMIT = Verdict(correct=False)
_CLOSED = "the verifier pool is closed"


#: items in a row without a verdict after which the verifier counts as defective: a group could be trained with its
#: cut-off completions only, and the run would continue with them
HOPELESS = 64


class Verifiers(abc.ABC):
    """Judges of completions, for one event loop.

    undecided  items without a verdict since the start
    failures   cause -> items since ``take_failures``: those without a verdict, and those over a limit
    """

    def __init__(self) -> None:
        self.undecided = 0
        self.failures: Counter[str] = Counter()
        self._failed_in_a_row = 0  # since the last verdict

    @property
    @abc.abstractmethod
    def waiting(self) -> int:
        """Number of items that wait to be begun."""

    async def verify(self, name: str, item: Item) -> Verdict:
        """Judge one completion with the verifier ``name``.

        Items that are given in one turn of the event loop travel together. Raises RewardError if the item has no
        verdict, NoVerifierError or StuckError if no item has one.
        """
        return await self.judge(VerifierWork(name), encoded(name, item))

    async def check_answer(self, name: str, item: Item) -> str | None:
        """Return why the verifier ``name`` cannot use the row of an item, which has no completion; None if it can.

        A check that raises, hangs or dies is such a reason, too. Raises NoVerifierError.
        """
        try:
            await self.judge(VerifierWork(name, check=True), encoded(name, item))
        except RewardError as error:
            return str(error)
        return None

    async def judge(self, work: VerifierWork, item: bytes) -> Verdict:
        """Do the work on an encoded item, with the errors of ``verify``."""
        raise NotImplementedError

    @abc.abstractmethod
    async def close(self) -> None: ...

    def take_failures(self) -> dict[str, int]:
        """Return the failures since the last call, by cause."""
        failures, self.failures = dict(self.failures), Counter()
        return failures

    def _count_verdict(self) -> None:
        self._failed_in_a_row = 0

    def _count_failure(self, error: RewardError) -> NoVerifierError | None:
        """Count a failure of an item. After many in a row the verifier or its limit is to blame, not the item.

        Then the attempt must fail with the error that is returned, so that the run ends by name.
        """
        self.failures[error.cause] += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row < HOPELESS:
            return None
        return NoVerifierError(f"{self._failed_in_a_row} completions in a row had no verdict; the last one: {error}")


@dataclass(frozen=True, slots=True)
class ItemLimits:
    """Limits of one item, from the moment when its process begins it.

    cpu_s      CPU time of the process: another load of the machine does not count
    elapsed_s  time on the clock, for a verifier that waits for something
    """

    cpu_s: float
    elapsed_s: float

    @classmethod
    def of(cls, config: RewardConfig) -> ItemLimits:
        return cls(config.timeout_s, config.elapsed_timeout_s)

    def left_s(self, cpu_s: float, elapsed_s: float) -> float:
        """Return the seconds after which the use must be looked at again; not more than 0 if a limit is reached."""
        return min(self.cpu_s - cpu_s, self.elapsed_s - elapsed_s)

    def cause(self, cpu_s: float) -> str:
        """Return which limit was reached (``verifier_protocol.CAUSES``)."""
        return CPU_TIME if cpu_s >= self.cpu_s else ELAPSED

    def reached(self, cpu_s: float) -> str:
        """Name the limit that was reached."""
        return f"{self.cpu_s:.3g} s of CPU time" if self.cause(cpu_s) == CPU_TIME else f"{self.elapsed_s:.3g} s"


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


class VerifierPool(Verifiers):
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
        super().__init__()
        self.restarts = 0  # processes replaced since the start
        self._arguments = arguments or {}
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

    async def judge(self, work: VerifierWork, item: bytes) -> Verdict:
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
            if self._closed:
                self._fail(calls, _CLOSED)
            elif calls:
                self._queue.setdefault(calls[0].work, deque()).extendleft(reversed(calls))
        return child if keep else None

    async def _start(self) -> VerifierProcess:
        if self._closed:
            raise NoVerifierError(_CLOSED)
        try:
            child = VerifierProcess()
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
            loaded = await child.load(name, self._arguments.get(name, {}), START_TIMEOUT_S)
        except RewardError as error:
            self._fail(calls, str(error))
            return False
        if loaded.problem:
            self._fail(calls, f"verifier {name} cannot be loaded: {loaded.problem}")
        return not loaded.spent

    async def _judge(self, child: VerifierProcess, calls: deque[_Call]) -> bool:
        """Settle calls in their order. Returns True if the process can be used further."""

        def deliver(outcomes: list[Outcome]) -> None:
            for outcome in outcomes:
                call = calls.popleft()
                if isinstance(outcome, Verdict):
                    self._count_verdict()
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
                if error.cause == CPU_TIME and not work.check and child.loaded[work.name].wrong_over_limit:
                    self._over_limit(call, error)
                else:
                    self._no_verdict(call, error)
            return False

    def _over_limit(self, call: _Call, error: RewardError) -> None:
        """Judge an item over the limit of CPU time as wrong. Many in a row mean that the limit is too low."""
        if (hopeless := self._count_failure(error)) is not None:
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
        self.undecided += 1
        call.fail(self._count_failure(error) or error)

    def _fail(self, calls: deque[_Call], problem: str) -> None:
        while calls:
            calls.popleft().fail(NoVerifierError(problem))

    async def _discard(self, child: VerifierProcess) -> None:
        if child in self._running:
            self._running.discard(child)
            self.restarts += not self._closed
        await child.kill()


# ---- one process: its socket, its journal of outcomes, its printed output


_REPORT_FRACTION = 0.1  # the process reports at least once in this part of the time limit
_QUICK_S = 0.05  # replies within this time are not measured
_KILL_S = 1.0  # bound on the wait for a killed process, which takes milliseconds unless the kernel itself hangs
_LAST_S = 0.2  # a process that has closed its socket exits within this time
_REPLY: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class VerifierProcess:
    """A verifier process. After a RewardError of ``open``, ``load`` or ``judge`` it must be killed."""

    def __init__(self) -> None:
        """Start the process, on the running event loop. Raises OSError."""
        self.loaded: dict[str, Loaded] = {}  # by verifier
        self._batches = 0  # given to the process
        self._talks = 0  # times that it had printed something
        self._writer: asyncio.StreamWriter | None = None
        self._journal = JournalReader()
        journal = self._journal.descriptor
        argv = [sys.executable, "-m", "realsys.reward.verifier_main", str(journal)]
        env = own_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        try:
            self._child = SocketChild(argv, env, "verifier", inherit=[journal])
        except OSError:
            self._journal.close()
            raise
        self.process = self._child.process

    async def open(self, timeout_s: float) -> None:
        """Wait until the process is up. Raises RewardError."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._child.socket, limit=MAX_REPLY)
        await self._reply(ItemLimits(math.inf, timeout_s), "to start")

    def has_ended(self) -> bool:
        """Return True if the process ended since its last batch; then no item is to blame."""
        return self._reader.at_eof()

    async def load(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Loaded:
        """Have the verifier loaded, unless it is. Raises RewardError."""
        if name in self.loaded:
            return self.loaded[name]
        doing = f"to load verifier {name}"
        self._send(name, [], 0.0, arguments=dict(arguments))
        reply = await self._reply(ItemLimits(math.inf, timeout_s), doing)
        if not isinstance(reply, Loaded):
            raise RewardError(f"verifier process {self.process.pid} said {reply} ({doing})")
        if not reply.problem:
            self.loaded[name] = reply
        return reply

    async def judge(
        self, work: VerifierWork, items: Sequence[bytes], limits: ItemLimits, deliver: Callable[[list[Outcome]], None]
    ) -> bool:
        """Hand the outcomes of the items to ``deliver``, in order. Returns False if the process is spent.

        Raises RewardError. Then the first item without an outcome is to blame.
        """
        name = work.name
        report_s = min(limits.cpu_s, limits.elapsed_s) * _REPORT_FRACTION
        # An item may begin up to report_s after the last report.
        most = ItemLimits(limits.cpu_s + report_s, limits.elapsed_s + report_s)
        self._send(name, items, report_s, check=work.check)
        told, spent = 0, False
        try:
            while told < len(items) and not spent:
                reply = await self._reply(most, f"verifier {name}")
                if not isinstance(reply, BatchDone) or not told < reply.count <= len(items):
                    problem = f"said {reply} after {told} of {len(items)} outcomes"
                    raise RewardError(f"verifier process {self.process.pid} {problem} (verifier {name})")
                told, spent = reply.count, reply.spent
                deliver(self._journal.read(told, len(items)))
        except RewardError:
            await self.process.end(_KILL_S)  # after this the journal does not change
            with contextlib.suppress(RewardError):  # none that can be read: the first error is the one to raise
                deliver(self._journal.read(told, len(items)))
            raise
        if said := self._child.said():
            self._talks += 1
            if is_logged(self._talks):
                log.info("verifier process %d printed: %s", self.process.pid, said)
        return not spent

    def _send(
        self, name: str, items: Sequence[bytes], report_s: float, check: bool = False, arguments: Any = None
    ) -> None:
        assert self._writer is not None, "open() comes first"
        self._batches += 1
        self._journal.begin()
        lines = [msgspec.Raw(item.replace(b"\n", b" ")) for item in items]  # of a service: JSON of another client
        self._writer.write(line(VerifierBatch(self._batches, name, lines, report_s, check, arguments or {})))

    async def _reply(self, limits: ItemLimits, doing: str) -> Reply:
        pid = self.process.pid
        try:
            reply = _REPLY.decode(await self._read(limits, doing))
        except (asyncio.IncompleteReadError, OSError):
            how = "it closed its end of the socket"
            if await self.process.exits_within(_LAST_S):
                how = how_it_ended(self.process.reap())
            raise RewardError(self._with_last_words(f"verifier process {pid} died: {how} ({doing})")) from None
        except (asyncio.LimitOverrunError, *MALFORMED) as error:
            raise RewardError(f"verifier process {pid}: reply cannot be read: {error} ({doing})") from error
        if reply.serial != self._batches:
            raise RewardError(f"verifier process {pid} replied to batch {reply.serial}, not {self._batches} ({doing})")
        return reply

    async def _read(self, limits: ItemLimits, doing: str) -> bytes:
        """Return the next message. Raises RewardError if the process reaches a limit before."""
        reading = asyncio.create_task(self._reader.readuntil())
        try:
            await asyncio.wait((reading,), timeout=_QUICK_S)
            if reading.done():  # nearly always: then the CPU time, which costs system calls, is not needed
                return reading.result()
            begin, cpu_before = time.monotonic(), self._cpu_s()
            while True:
                cpu_s = self._cpu_s() - cpu_before
                left_s = limits.left_s(cpu_s, time.monotonic() - begin)
                if left_s <= 0:
                    problem = f"killed: no result within {limits.reached(cpu_s)} ({doing})"
                    message = self._with_last_words(f"verifier process {self.process.pid} {problem}")
                    raise RewardError(message, limits.cause(cpu_s))
                await asyncio.wait((reading,), timeout=left_s)
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()

    def _cpu_s(self) -> float:
        """Return the CPU time of the process and its ended children."""
        try:
            return sum(psutil.Process(self.process.pid).cpu_times()[:4])
        except psutil.Error:  # it has ended: the end of its socket follows
            return 0.0

    def _with_last_words(self, problem: str) -> str:
        return f"{problem}; it printed: {said}" if (said := self._child.said()) else problem

    async def kill(self) -> None:
        """Kill the process and its group, collect it, and close its socket and files."""
        await self.process.end(_KILL_S)
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._writer.close()
        self._child.close()
        self._journal.close()


# ---- comparison of final answers with each other, for majority votes: by the verifier itself, if it declares that


#: Limit for all comparisons of an evaluation: n samples of a problem may need n * n / 2 of them.
COMPARING_S = 300.0


class Answered(Protocol):
    """The part of a stored completion that this module needs."""

    @property
    def prompt(self) -> str: ...

    @property
    def completion(self) -> str: ...

    @property
    def answer(self) -> str | None: ...


class AnswerComparer:
    """Compares final answers in a process of the verifier: ``with AnswerComparer(config, name) as comparer: ...``

    The process starts with the first comparison. Must not be used in an event loop. A comparison raises WaitTimeout
    ``limit_s`` after the start.
    """

    def __init__(self, config: Config, verifier: str, limit_s: float = COMPARING_S) -> None:
        self._name = verifier
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._pool = VerifierPool(1, ItemLimits.of(config.rollout.reward), verifier_arguments(config))
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._pool.close())

    def same_of(self, samples: Sequence[Answered]) -> Callable[[str, str], bool] | None:
        """Return the comparison of the final answers of one problem's completions; None: by their texts."""
        if not getattr(VERIFIER.load(self._name), "compares_answers", False):
            return None
        by_answer = {sample.answer: sample for sample in samples}

        def same(first: str, second: str) -> bool:
            if time.monotonic() > self._ends:
                raise WaitTimeout(f"comparing the final answers took more than {self._limit_s:g} s")
            item = Item(by_answer[first].prompt, by_answer[first].completion, second)
            try:
                return self._runner.run(self._pool.verify(self._name, item)).correct is True
            except (RewardError, NoVerifierError):  # an answer that is no reference is equal to no other
                return False

        return same

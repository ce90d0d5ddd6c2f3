"""VerifierProcess: one verifier process as its pool sees it: socket, journal of outcomes, printed output.

The process group is killed with the process. Its output goes to a temporary file, and the end of that file to our log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from realsys.cluster.children.child_process import ChildProcess, how_it_ended
from realsys.config.schema_rollout import RewardConfig
from realsys.errors import MALFORMED, RewardError
from realsys.reward.verifier_protocol import (
    CPU_TIME,
    ELAPSED,
    LENGTH,
    MAX_REPLY,
    BatchDone,
    JournalReader,
    Loaded,
    NotLoaded,
    Outcome,
    Reply,
    VerifierBatch,
    frame,
)

log = logging.getLogger(__name__)

REPORT_FRACTION = 0.1  # the process reports at least once in this part of the time limit
_QUICK_S = 0.05  # replies within this time are not measured
_KILL_S = 1.0  # bound on the wait for a killed process, which takes milliseconds unless the kernel itself hangs
_LAST_S = 0.2  # a process that has closed its socket exits within this time
_SHOWN = 300  # characters of what a verifier printed
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


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

    def extended(self, seconds: float) -> ItemLimits:
        return ItemLimits(self.cpu_s + seconds, self.elapsed_s + seconds)


@dataclass(frozen=True, slots=True)
class VerifierWork:
    """Kind of work on an item: judge its completion with the verifier ``name``, or ``check`` its reference."""

    name: str
    check: bool = False


class VerifierProcess:
    """A verifier process. After a RewardError of ``open``, ``load`` or ``judge`` it must be killed."""

    def __init__(self, memory_bytes: int) -> None:
        """Start the process, on the running event loop. Raises OSError."""
        self._loaded: dict[str, bool] = {}  # verifier -> a completion over the limit of CPU time is wrong
        self._batches = 0  # given to the process
        self._talks = 0  # times that it had printed something
        self._writer: asyncio.StreamWriter | None = None
        # A file, because a verifier could fill our log; RLIMIT_FSIZE bounds the file (verifier_main.py).
        self._printed = tempfile.TemporaryFile("a+b", buffering=0, prefix="realsys-verifier-")  # noqa: SIM115
        self._journal = JournalReader()
        ours, theirs = socket.socketpair()
        self._socket = ours
        descriptors = [theirs.fileno(), self._journal.descriptor]
        arguments = [str(number) for number in (*descriptors, os.getpid(), memory_bytes)]
        try:
            with theirs:
                argv = [sys.executable, "-m", "realsys.reward.verifier_main", *arguments]
                self.process = ChildProcess(argv, _environment(), self._printed, inherit=descriptors)
        except OSError:
            self._close()
            raise

    async def open(self, timeout_s: float) -> None:
        """Wait until the process is up. Raises RewardError."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        await self._reply(ItemLimits(math.inf, timeout_s), "to start")

    def has_ended(self) -> bool:
        """Return True if the process ended since its last batch; then no item is to blame."""
        return self._reader.at_eof()

    async def load(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> NotLoaded | None:
        """Have the verifier loaded. Returns the refusal, or None. Raises RewardError."""
        if name in self._loaded:
            return None
        doing = f"to load verifier {name}"
        self._send(name, [], 0.0, arguments=arguments)
        reply = await self._reply(ItemLimits(math.inf, timeout_s), doing)
        if isinstance(reply, NotLoaded):
            return reply
        if not isinstance(reply, Loaded):
            raise RewardError(f"verifier process {self.process.pid} said {reply} ({doing})")
        self._loaded[name] = reply.wrong_over_limit
        return None

    def wrong_over_limit(self, name: str) -> bool:
        """Return True if a completion over the limit of CPU time is wrong. The verifier must be loaded."""
        return self._loaded[name]

    async def judge(
        self, work: VerifierWork, items: Sequence[bytes], limits: ItemLimits, deliver: Callable[[list[Outcome]], None]
    ) -> bool:
        """Hand the outcomes of the items to ``deliver``, in order. Returns False if the process is spent.

        Raises RewardError. Then the first item without an outcome is to blame.
        """
        name = work.name
        report_s = min(limits.cpu_s, limits.elapsed_s) * REPORT_FRACTION
        self._send(name, items, report_s, check=work.check)
        told, spent = 0, False
        try:
            while told < len(items) and not spent:
                # An item may begin up to report_s after the last report.
                reply = await self._reply(limits.extended(report_s), f"verifier {name}")
                if not isinstance(reply, BatchDone) or not told < reply.count <= len(items):
                    problem = f"said {reply} after {told} of {len(items)} outcomes"
                    raise RewardError(f"verifier process {self.process.pid} {problem} (verifier {name})")
                told, spent = reply.count, reply.spent
                deliver(self._journal.read(told, len(items)))
        except RewardError:
            await self._end()  # after this the journal does not change
            with contextlib.suppress(RewardError):  # none that can be read: the first error is the one to raise
                deliver(self._journal.read(told, len(items)))
            raise
        self._log_printed()
        return not spent

    def _send(
        self,
        name: str,
        items: Sequence[bytes],
        report_s: float,
        *,
        check: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        assert self._writer is not None, "open() comes first"
        self._batches += 1
        self._journal.begin(self._batches)
        self._writer.write(
            frame(VerifierBatch(self._batches, name, list(items), report_s, check, dict(arguments or {})))
        )

    async def _reply(self, limits: ItemLimits, doing: str) -> Reply:
        pid = self.process.pid
        try:
            reply = _REPLY.decode(await self._read(limits, doing))
        except (asyncio.IncompleteReadError, OSError):
            problem = f"verifier process {pid} died: {await self._how_it_ended()} ({doing})"
            raise RewardError(self._with_last_words(problem)) from None
        except MALFORMED as error:
            raise RewardError(f"verifier process {pid}: reply cannot be read: {error} ({doing})") from error
        if reply.serial != self._batches:
            raise RewardError(f"verifier process {pid} replied to batch {reply.serial}, not {self._batches} ({doing})")
        return reply

    async def _read(self, limits: ItemLimits, doing: str) -> bytes:
        """Return the next message. Raises RewardError if the process reaches a limit before."""
        reading = asyncio.create_task(self._read_message(doing))
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

    async def _read_message(self, doing: str) -> bytes:
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > MAX_REPLY:
            raise RewardError(f"verifier process {self.process.pid} sent a message of {size} bytes ({doing})")
        return await self._reader.readexactly(size)

    def _cpu_s(self) -> float:
        """Return the CPU time of the process and its ended children."""
        try:
            return sum(psutil.Process(self.process.pid).cpu_times()[:4])
        except psutil.Error:  # it has ended: the end of its socket follows
            return 0.0

    async def _how_it_ended(self) -> str:
        if not await self.process.exits_within(_LAST_S):
            return "it closed its end of the socket"
        return how_it_ended(self.process.reap())

    def _said(self) -> str:
        """Return the end of the output since the last call, in one line."""
        if self._printed.closed or not (size := os.fstat(self._printed.fileno()).st_size):
            return ""
        text = os.pread(self._printed.fileno(), 4 * _SHOWN, max(0, size - 4 * _SHOWN)).decode("utf-8", "replace")
        self._printed.truncate(0)
        return " ".join(text.split())[-_SHOWN:]

    def _log_printed(self) -> None:
        if said := self._said():
            self._talks += 1
            if self._talks <= 10 or self._talks & (self._talks - 1) == 0:
                log.info("verifier process %d printed: %s", self.process.pid, said)

    def _with_last_words(self, problem: str) -> str:
        return f"{problem}; it printed: {said}" if (said := self._said()) else problem

    async def kill(self) -> None:
        """Kill the process and its group, collect it, and close its socket and files."""
        await self._end()
        self._close()

    async def _end(self) -> None:
        """Kill the process and collect it."""
        self.process.kill()
        if await self.process.exits_within(_KILL_S):
            self.process.reap()
        else:
            log.error("verifier process %d was killed and is still there after %g s", self.process.pid, _KILL_S)

    def _close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._writer.close()
        self._socket.close()
        self._printed.close()
        self._journal.close()


def _environment() -> dict[str, str]:
    """One thread each, and this very realsys wherever the parent was started."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **own}

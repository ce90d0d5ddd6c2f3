"""VerifierPool: verifiers in processes of their own, so that a slow, hung or crashing one stalls nothing.

    verify_batch ──> idle process ──socket──> verifier ──verdicts──> list[bool]
                        │  no word within the time limit, or it dies: killed, replaced, RewardError
                        └─ the verifier raises: RewardError, the process stays (not if it lacks memory, or files)

An error is never a verdict: a batch yields a verdict for each answer, or RewardError. Each process leads a session of
its own, which is killed with it. What it prints goes to a file of its own, and the end of that to our log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from realsys.errors import MALFORMED, RewardError
from realsys.reward.messages import LENGTH, MAX_REPLY, Batch, Failed, Item, Reply, frame

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # to start Python and to import a verifier's libraries on a busy machine
REPORT_FRACTION = 0.1  # of the time limit: how far the verdicts received may lag behind those made
MEMORY_BYTES = 4 << 30  # address space of a process; a verifier that wants more gets MemoryError
_KILL_S = 1.0  # bound on the wait for a killed process, which takes milliseconds unless the kernel itself hangs
_SHOWN = 300  # characters of what a verifier printed
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class VerifierPool:
    """``processes`` verifiers at a time; ``timeout_s`` bounds the time spent on one answer. For one event loop."""

    def __init__(
        self,
        processes: int,
        timeout_s: float,
        *,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if processes < 1:
            raise ValueError(f"a verifier pool needs at least one process, got {processes}")
        self.restarts = 0  # processes replaced since the start
        self._timeout_s, self._start_timeout_s, self._memory = timeout_s, start_timeout_s, memory_bytes
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()  # None: to be started when needed
        for _ in range(processes):
            self._idle.put_nowait(None)
        self._running: set[_Process] = set()
        self._closed = False

    async def verify(self, name: str, prompt: str, answer: str, reference: str) -> bool:
        """Whether the answer is right. Raises RewardError if that cannot be said."""
        return (await self.verify_batch(name, [Item(prompt, answer, reference)]))[0]

    async def verify_batch(self, name: str, items: Sequence[Item]) -> list[bool]:
        """The same for several answers in one trip; one failure fails them all. Raises RewardError."""
        if not items:
            return []
        process = await self._idle.get()
        keep = False
        try:
            if self._closed:
                raise RewardError("the verifier pool is closed")
            if process is None:
                process = await self._start()
            verdicts = await process.run(name, items, self._timeout_s, self._start_timeout_s)
            keep = True
            return verdicts
        except _VerifierFailed as failure:
            keep = True  # it answered: the process is well
            raise RewardError(str(failure)) from None
        finally:
            # Anything else, cancellation too, leaves the process in the middle of something.
            if process is not None and not keep:
                self._discard(process)
            self._idle.put_nowait(process if keep else None)

    async def close(self) -> None:
        """Kill the processes. Batches still running get a RewardError."""
        self._closed = True
        for process in list(self._running):
            self._running.discard(process)
            process.kill()

    async def _start(self) -> _Process:
        try:
            process = _Process(self._memory)
        except OSError as error:
            raise RewardError(f"a verifier process cannot be started: {error}") from error
        self._running.add(process)
        try:
            await process.open(self._start_timeout_s)
        except BaseException:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        if process in self._running:
            self._running.discard(process)
            self.restarts += 1
        process.kill()


class _VerifierFailed(Exception):
    """The verifier raised; its process is unharmed."""


class _Process:
    """One verifier process, the socket to it, and the file that it prints into."""

    def __init__(self, memory_bytes: int) -> None:
        self._loaded: set[str] = set()
        self._batches = self._talks = 0  # given to it; after which it had printed something
        self._writer: asyncio.StreamWriter | None = None
        # Not our log, which it could fill; a file has an end (process.py).
        self._printed = tempfile.TemporaryFile("a+b", buffering=0, prefix="realsys-verifier-")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        self._socket = ours
        arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_bytes)]
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", "realsys.reward.process", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=self._printed,
                    stderr=self._printed,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            self._printed.close()
            raise

    async def open(self, timeout_s: float) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        await self._reply(timeout_s, "to start")

    async def run(self, name: str, items: Sequence[Item], timeout_s: float, start_timeout_s: float) -> list[bool]:
        """Verdicts on all items. Any exception but _VerifierFailed means that the process is to be replaced."""
        assert self._writer is not None, "open() comes first"
        report_s = timeout_s * REPORT_FRACTION
        self._batches += 1
        self._writer.write(frame(Batch(self._batches, name, list(items), report_s)))
        if name not in self._loaded:
            reply = await self._reply(start_timeout_s, f"to load verifier {name}")
            if isinstance(reply, Failed):
                raise _failure(f"verifier {name} cannot be loaded", reply)
            self._loaded.add(name)
        verdicts: list[bool] = []
        while len(verdicts) < len(items):
            place = f"verifier {name}, answer {len(verdicts) + 1} of {len(items)}"
            reply = await self._reply(timeout_s + report_s, place)
            failed = isinstance(reply, Failed)
            verdicts += reply.verdicts
            if len(verdicts) + failed > len(items) or not (reply.verdicts or failed):
                problem = f"gave {len(reply.verdicts)} verdicts more, {len(verdicts)} on {len(items)} answers"
                raise RewardError(f"verifier process {self._popen.pid} {problem} ({place})")
            if isinstance(reply, Failed):
                raise _failure(f"verifier {name}, answer {len(verdicts) + 1} of {len(items)}", reply)
        if said := self._said():
            self._talks += 1
            if self._talks <= 10 or self._talks & (self._talks - 1) == 0:
                log.info("verifier process %d printed: %s", self._popen.pid, said)
        return verdicts

    async def _reply(self, timeout_s: float, doing: str) -> Reply:
        pid = self._popen.pid
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > MAX_REPLY:
                    raise RewardError(f"verifier process {pid} sent a message of {size} bytes ({doing})")
                reply = _REPLY.decode(await self._reader.readexactly(size))
        except TimeoutError:
            problem = f"verifier process {pid} killed: no result within {timeout_s:.3g} s ({doing})"
            raise RewardError(self._with_last_words(problem)) from None
        except (asyncio.IncompleteReadError, OSError):
            problem = f"verifier process {pid} died: {self._how_it_ended()} ({doing})"
            raise RewardError(self._with_last_words(problem)) from None
        except MALFORMED as error:
            raise RewardError(f"verifier process {pid}: reply cannot be read: {error} ({doing})") from error
        if reply.serial != self._batches:
            raise RewardError(f"verifier process {pid} replied to batch {reply.serial}, not {self._batches} ({doing})")
        return reply

    def _how_it_ended(self) -> str:
        # Its end of the socket is closed, so it is ending.
        if self._popen.returncode is None:
            if not self._has_ended(0.2):
                return "it closed its end of the socket"
            self._end()
        code = self._popen.returncode
        if code is None:
            return "it cannot be collected"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _has_ended(self, timeout_s: float) -> bool:
        """Whether it ends in that time. It stays a zombie, and its pid its own."""
        descriptor = os.pidfd_open(self._popen.pid)
        try:
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)

    def _said(self) -> str:
        """The end of what was printed since this was asked last, in one line."""
        if self._printed.closed or not (size := os.fstat(self._printed.fileno()).st_size):
            return ""
        text = os.pread(self._printed.fileno(), 4 * _SHOWN, max(0, size - 4 * _SHOWN)).decode("utf-8", "replace")
        self._printed.truncate(0)
        return " ".join(text.split())[-_SHOWN:]

    def _with_last_words(self, problem: str) -> str:
        return f"{problem}; it printed: {said}" if (said := self._said()) else problem

    def kill(self) -> None:
        """End it and what it has started, now."""
        self._end()
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._writer.close()
        self._socket.close()
        self._printed.close()

    def _end(self) -> None:
        """SIGKILL to it and its group; collect it."""
        if self._popen.returncode is not None:  # its pid may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):  # it leads its group no longer
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.kill()
        try:
            self._popen.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            log.error("verifier process %d was killed and is still there after %g s", self._popen.pid, _KILL_S)


def _failure(what: str, reply: Failed) -> Exception:
    """What to raise for it: the process is unharmed, or spent."""
    problem = f"{what}: {reply.message}"
    return RewardError(f"{problem}; the process is replaced") if reply.spent else _VerifierFailed(problem)


def _environment() -> dict[str, str]:
    """One thread each, and this very realsys wherever the parent was started."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **own}

"""VerifierPool: verifiers in processes of their own, so that a slow, hung or crashing one stalls nothing.

    verify_batch ──> idle process ──socket──> verifier ──verdicts──> list[bool]
                        │  no word within the time limit, or it dies: killed, replaced, RewardError
                        └─ the verifier raises: RewardError, the process stays

An error is never a verdict: a batch yields a verdict for each answer, or RewardError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from realsys.errors import MALFORMED, RewardError
from realsys.reward.messages import LENGTH, MAX_MESSAGE, Batch, Failed, Item, Reply, frame

START_TIMEOUT_S = 60.0  # to start Python and to import a verifier's libraries on a busy machine
REPORT_FRACTION = 0.1  # of the time limit: how far the verdicts received may lag behind those made
MEMORY_BYTES = 4 << 30  # address space of a process; a verifier that wants more gets MemoryError
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
        process = _Process(self._memory)
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
    """One verifier process and the socket to it."""

    def __init__(self, memory_bytes: int) -> None:
        self._loaded: set[str] = set()
        self._writer: asyncio.StreamWriter | None = None
        ours, theirs = socket.socketpair()
        self._socket = ours
        arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_bytes)]
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", "realsys.reward.process", *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                )
        except OSError as error:
            ours.close()
            raise RewardError(f"a verifier process cannot be started: {error}") from error

    async def open(self, timeout_s: float) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        await self._reply(timeout_s, "to start")

    async def run(self, name: str, items: Sequence[Item], timeout_s: float, start_timeout_s: float) -> list[bool]:
        """Verdicts on all items. Any exception but _VerifierFailed means that the process is to be replaced."""
        assert self._writer is not None, "open() comes first"
        report_s = timeout_s * REPORT_FRACTION
        self._writer.write(frame(Batch(name, list(items), report_s)))
        if name not in self._loaded:
            reply = await self._reply(start_timeout_s, f"to load verifier {name}")
            if isinstance(reply, Failed):
                raise _VerifierFailed(f"verifier {name} cannot be loaded: {reply.message}")
            self._loaded.add(name)
        verdicts: list[bool] = []
        while len(verdicts) < len(items):
            place = f"verifier {name}, answer {len(verdicts) + 1} of {len(items)}"
            reply = await self._reply(timeout_s + report_s, place)
            verdicts += reply.verdicts
            if isinstance(reply, Failed):
                raise _VerifierFailed(f"verifier {name}, answer {len(verdicts) + 1} of {len(items)}: {reply.message}")
        return verdicts

    async def _reply(self, timeout_s: float, doing: str) -> Reply:
        try:
            async with asyncio.timeout(timeout_s):
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > MAX_MESSAGE:
                    raise RewardError(f"verifier process {self._popen.pid} sent a message of {size} bytes ({doing})")
                return _REPLY.decode(await self._reader.readexactly(size))
        except TimeoutError:
            pid = self._popen.pid
            raise RewardError(f"verifier process {pid} killed: no result within {timeout_s:.3g} s ({doing})") from None
        except (asyncio.IncompleteReadError, OSError):
            raise RewardError(f"verifier process {self._popen.pid} died: {self._how_it_ended()} ({doing})") from None
        except MALFORMED as error:
            raise RewardError(f"verifier process {self._popen.pid}: reply cannot be read: {error}") from error

    def _how_it_ended(self) -> str:
        # Its end of the socket is closed, so it is ending; killing it makes sure that this does not wait for long.
        try:
            code = self._popen.wait(0.2)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it now and collect it; after SIGKILL that takes milliseconds."""
        self._popen.kill()
        self._popen.wait()
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._writer.close()
        self._socket.close()


def _environment() -> dict[str, str]:
    """One thread each, and this very realsys wherever the parent was started."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

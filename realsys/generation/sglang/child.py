"""One run of SGLang's server: start, log, health, end.

    start ──> [GET /health until 200] ──> serving, asked now and then whether it samples ──> ended
                 │ exits, or not in time: GenerationError with the last lines of its log

Its output is passed on to our log line by line. Every run is killed with all its processes when ``stop`` is called or
when this process is gone, however that comes about (guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from realsys.errors import GenerationError

log = logging.getLogger(__name__)
output = logging.getLogger("sglang")  # what SGLang itself says

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 15
_LINE_LIMIT = 4000  # characters of a line that is passed on: SGLang prints all its settings in one
_HEALTH_INTERVAL_S = 0.2  # SGLang announces readiness in no other way
_HEALTH_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
_LAST_WORDS_S = 2.0


class Child:
    """Belongs to the event loop that started it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = asyncio.create_task(self._forward(), name="sglang log")
        self.ended = asyncio.create_task(self._wait(), name="sglang exit")

    @classmethod
    async def start(cls, command: Sequence[str], env: dict[str, str], url: str, remove: Path) -> Child:
        """Start ``command``, which is to serve at ``url``. The folder ``remove`` goes when it ends, and so do the
        temporary files of the command: SGLang never removes the sockets between its processes.
        """
        guarded = [sys.executable, "-I", str(_GUARD), "--remove", str(remove), "--", *command]
        log.info("starting %s", " ".join(command))
        process = await asyncio.create_subprocess_exec(
            *guarded,
            env={**env, "TMPDIR": str(remove)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(process, url)

    @property
    def pid(self) -> int:
        """Of the guard, which leads the session of all its processes."""
        return self._process.pid

    async def healthy(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Return when it answers. Raises GenerationError when it has ended, or has not answered in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ended.done():
                    if await self._answers(session, "/health", _HEALTH_TIMEOUT_S):
                        return
                    await asyncio.wait({self.ended}, timeout=_HEALTH_INTERVAL_S)
        except TimeoutError:
            raise GenerationError(
                f"SGLang did not answer /health within {timeout_s:g} s (generation.sglang.start_timeout_s); "
                f"its last lines: {self.tail()}"
            ) from None
        raise GenerationError(f"SGLang {self.ended.result()} before it answered; its last lines: {self.tail()}")

    async def samples(self, session: aiohttp.ClientSession, timeout_s: float) -> bool:
        """Whether it has sampled anything since it was asked: for a request, or else for this question.

        SGLang itself gives the answer up after 20 s. One that is paused, or loads weights, says no as well.
        """
        return await self._answers(session, "/health_generate", timeout_s)

    def tail(self) -> str:
        """The last lines of its output, in one."""
        return " | ".join(line for line in self._tail if line.strip()) or "none"

    def kill(self) -> None:
        """Have it killed with all its processes; ``ended`` says when."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard's word to end

    async def stop(self) -> None:
        """Kill it, and wait for that."""
        self.kill()
        done, _ = await asyncio.wait({self.ended}, timeout=_STOP_TIMEOUT_S)
        if not done:
            log.error("the guard of SGLang did not end within %.0f s; killing it", _STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.ended

    async def _answers(self, session: aiohttp.ClientSession, path: str, timeout_s: float) -> bool:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with session.get(self.url + path, timeout=timeout) as response:
                return response.status == 200
        return False

    async def _wait(self) -> str:
        """How it ended, once it has and all it said is logged."""
        code = await self._process.wait()
        # If the guard was killed, a process that it would have found may still have the pipe open.
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        self._reader.cancel()
        number = -code if code < 0 else code - 128  # of the guard, or passed on by it
        return f"was killed by {signal.Signals(number).name}" if 0 < number < 32 else f"exited with code {code}"

    async def _forward(self) -> None:
        """Consumes its output to the end."""
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._say(line)
            rest = rest[:_LINE_LIMIT]
        if rest:
            self._say(rest)

    def _say(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip()
        if text:
            output.info("%s", text)
            self._tail.append(text[:300])

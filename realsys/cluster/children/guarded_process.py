"""One run of a server of another package under the guard: start, log, end.

Its output is passed on to our log line by line. All its processes are killed when ``stop`` is called or when this
process ends, in whatever way (guard.py).
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from realsys.cluster.children.child_process import ChildProcess, how_it_ended, lines_of, resident_bytes_below

log = logging.getLogger(__name__)

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 15
_LINE_LIMIT = 4000  # characters of a line that is passed on: SGLang prints all its settings in one line
_STOP_TIMEOUT_S = 10.0
_LAST_WORDS_S = 2.0
_DEATH_S = 10.0  # the guard needs up to 7 s to end the other processes
_MEMORY_S = 10.0  # between two measurements of memory, which read all processes of the machine


class GuardedProcess:
    """A server of another package with all its processes. Belongs to the event loop that started it."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], remove: Path, guard: Sequence[str] = ()
    ) -> None:
        """Start ``command`` under the guard, with further arguments ``guard`` of that. Raises OSError.

        name    its word in messages, and in lower case its log
        remove  folder of its temporary files, which is removed when it ends
        """
        self.name = name
        self._output = logging.getLogger(name.lower())
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        argv = [sys.executable, "-E", "-P", str(_GUARD), *guard, "--remove", str(remove), "--", *command]
        log.info("starting %s", " ".join(command))
        env = {**env, "TMPDIR": str(remove)}
        self._process = ChildProcess(argv, env, subprocess.PIPE, stdin=subprocess.PIPE)
        self._reader = asyncio.create_task(self._forward(), name=f"{name} log")
        self.ended = asyncio.create_task(self._wait(), name=f"{name} exit")
        self._measure_at = 0.0
        self._resident_bytes = 0

    @property
    def pid(self) -> int:
        """Pid of the guard, which leads the session of all processes."""
        return self._process.pid

    def tail(self) -> str:
        """Return the last lines of the output, joined."""
        return " | ".join(line for line in self._tail if line.strip()) or "none"

    async def last_words(self) -> str:
        """Return how the process ended, or that it runs, with its last lines. Call it before ``kill``.

        A process that has just died is given some seconds, in which the guard ends the others.
        """
        done, _ = await asyncio.wait({self.ended}, timeout=_DEATH_S)
        how = self.ended.result() if done else "still runs"
        return f"{self.name} {how}; its last lines: {self.tail()}"

    async def resident_bytes(self) -> int:
        """Return the memory in RAM of all processes of the server, as it was within the last seconds."""
        if (now := time.monotonic()) >= self._measure_at:
            self._measure_at = now + _MEMORY_S
            self._resident_bytes = await asyncio.to_thread(resident_bytes_below, self.pid)
        return self._resident_bytes

    def kill(self) -> None:
        """Kill the process tree; ``ended`` resolves when it is gone."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.close()  # the guard then kills everything

    async def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Kill the process tree and wait until it is gone; after ``timeout_s`` kill the guard, too."""
        self.kill()
        done, _ = await asyncio.wait({self.ended}, timeout=timeout_s)
        if not done:
            log.error("the guard of %s did not end within %.0f s; killing it", self.name, timeout_s)
            self._process.kill()
            await self.ended

    async def _wait(self) -> str:
        """Return how the process ended, after all its output is logged."""
        await self._process.exits_within(None)
        code = self._process.reap()
        # If the guard was killed, a process that it would have found may still hold the pipe open.
        await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
        self._reader.cancel()
        return how_it_ended(128 - code if code > 128 else code)  # the guard exits with 128 + the signal

    async def _forward(self) -> None:
        """Consume the output to its end."""
        pipe = self._process.popen.stdout
        assert pipe is not None
        async for line in lines_of(pipe, _LINE_LIMIT):
            if text := line.decode("utf-8", "replace").rstrip():
                self._output.info("%s", text)
                self._tail.append(text[:300])

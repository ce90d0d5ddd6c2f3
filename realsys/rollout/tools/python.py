"""The tool ``python``: runs a program in the sandbox and returns its output."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from realsys.errors import ConfigError
from realsys.reward.sandbox.sandbox import Sandbox
from realsys.reward.sandbox.settings import INSTALL, Output, RunLimits
from realsys.rollout.tools.base import ToolError, describe, text_argument

MEMORY_MB = 512.0
_SHORTEST_S = 0.1


class Python:
    """Tool that runs Python programs. They see no file of the trial, no network, and nothing of each other."""

    description = describe(
        "python", "Runs a Python program and returns what it prints.", code="the whole program, with print"
    )

    def __init__(self) -> None:
        """Raise ConfigError if this machine cannot isolate programs."""
        if shutil.which("bwrap") is None:
            problem = f"python needs a sandbox, and bwrap is not found: {INSTALL}, or leave python out"
            raise ConfigError("rollout.agent_args.tools", "python", problem)
        self._places = max(2, os.cpu_count() or 2)  # programs that run at a time
        self._running = 0
        self._ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(self._places, "python-tool")
        self._own = threading.local()  # a sandbox belongs to one thread
        self._sandboxes: list[Sandbox] = []

    async def ready(self) -> None:
        """Wait for a free thread. Programs of other episodes hold each one for their bounded time."""
        while self._running >= self._places:
            self._ended.clear()
            await self._ended.wait()

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what the program ``code`` prints, and the last line of its error."""
        code, loop = text_argument(arguments, "code"), asyncio.get_running_loop()
        program = loop.run_in_executor(self._threads, self._run, code, timeout_s)
        self._running += 1
        program.add_done_callback(self._end)
        return await asyncio.shield(program)  # a call that is cancelled leaves its thread busy

    def close(self) -> None:
        """End the sandboxes, and with them all programs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _end(self, _: asyncio.Future[str]) -> None:
        self._running -= 1
        self._ended.set()

    def _run(self, code: str, timeout_s: float) -> str:
        if not hasattr(self._own, "sandbox"):
            self._own.sandbox = Sandbox()
            self._sandboxes.append(self._own.sandbox)
        seconds = max(_SHORTEST_S, timeout_s)
        limits = RunLimits(cpu_s=seconds, wall_s=seconds, memory_mb=MEMORY_MB)
        output: Output = self._own.sandbox.run(code, b"", limits)
        printed = output.stdout.decode("utf-8", "replace")
        if not output.ended.reason:
            return printed
        lines = output.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if output.ended.reason == "crashed" and lines else f"limit reached: {output.ended.reason}"
        raise ToolError(f"{printed}error: {reason}")

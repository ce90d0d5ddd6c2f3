"""One run of SGLang: start, health, end.

start ──> [GET /health until 200] ──> serving, probed for samples ──> ended
             │ exits, or not in time: GenerationError with the last lines of its log
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from realsys.cluster.children.guarded_process import GuardedProcess
from realsys.cluster.http_client import HttpClient
from realsys.errors import GenerationError

_SHARED_MEMORY = r"/dev/shm/sglang_loads_\S+"  # SGLang's processes publish their load there, and never remove it
_HEALTH_INTERVAL_S = 0.2  # the only way to learn that SGLang is ready
_HEALTH_TIMEOUT_S = 5.0


class SglangProcess(GuardedProcess):
    """One run of SGLang. Its guard removes what SGLang leaves: shared memory, and the sockets of its processes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], url: str, remove: Path) -> None:
        """Start ``command``, which serves at ``url`` and has its sockets in ``remove``. Raises OSError."""
        self.url = url
        super().__init__("SGLang", command, env, remove, ["--shared", _SHARED_MEMORY])

    async def wait_healthy(self, http: HttpClient, timeout_s: float) -> None:
        """Return when the server answers. Raises GenerationError if it exits, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                if await self._healthy(http):
                    return
        except TimeoutError:
            raise GenerationError(
                f"SGLang did not answer /health within {timeout_s:g} s (generation.sglang.start_timeout_s); "
                f"its last lines: {self.tail()}"
            ) from None
        raise GenerationError(f"SGLang {self.ended.result()} before it answered; its last lines: {self.tail()}")

    async def _healthy(self, http: HttpClient) -> bool:
        while not self.ended.done():
            if await http.answers(f"{self.url}/health", _HEALTH_TIMEOUT_S):
                return True
            await asyncio.wait({self.ended}, timeout=_HEALTH_INTERVAL_S)
        return False

    async def samples(self, http: HttpClient, timeout_s: float) -> bool:
        """Return True if SGLang samples a token, for a running request or else for this call.

        SGLang's own limit on the call is 20 s. While it is paused or loads weights the result is False.
        """
        return await http.answers(f"{self.url}/health_generate", timeout_s)

"""One run of an engine: its process, its health and its end.

start ──> [GET /health until 200] ──> serving, probed for samples ──> ended
             │ exits, or not in time: GenerationError with the last lines of its log
"""

from __future__ import annotations

import asyncio
import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from realsys.cluster.children.child_process import GuardedProcess
from realsys.cluster.http_client import HttpClient
from realsys.cluster.network import free_ports, join_host_port
from realsys.errors import GenerationError
from realsys.generation.child.contract import EngineLaunch

LOOPBACK = "127.0.0.1"
#: variables of our interpreter that are wrong in another one
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_HEALTH_INTERVAL_S = 0.2  # the only way to learn that an engine is ready
_HEALTH_TIMEOUT_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


class EngineProcess(GuardedProcess):
    """One run of an engine. Its guard removes the shared memory and the sockets that it leaves."""

    def __init__(self, launch: EngineLaunch) -> None:
        """Start it on a free port. Raises OSError."""
        [port] = free_ports(1)
        self.url = f"http://{join_host_port(LOOPBACK, port)}"
        self.scratch = _scratch_folder(launch.api.name.lower())
        self._field = launch.api.field
        super().__init__(launch.api.name, launch.command(port), launch.environment(), self.scratch, launch.api.guard)

    async def wait_healthy(self, http: HttpClient, timeout_s: float) -> None:
        """Return when the server answers. Raises GenerationError if it exits, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                if await self._healthy(http):
                    return
        except TimeoutError:
            raise GenerationError(
                f"{self.name} did not answer /health within {timeout_s:g} s ({self._field}.start_timeout_s); "
                f"its last lines: {self.tail()}"
            ) from None
        raise GenerationError(f"{self.name} {self.ended.result()} before it answered; its last lines: {self.tail()}")

    async def _healthy(self, http: HttpClient) -> bool:
        while not self.ended.done():
            if await http.answers(f"{self.url}/health", _HEALTH_TIMEOUT_S):
                return True
            await asyncio.wait({self.ended}, timeout=_HEALTH_INTERVAL_S)
        return False


def _scratch_folder(name: str) -> Path:
    """Make a folder, in memory-backed storage if the machine has it."""
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"realsys-{name}-", dir=base))


def engine_environment(threads: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of an interpreter that is not ours."""
    env = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    # torch's default is a folder in TMPDIR, which is removed with each run.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    return env | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # Everything is on disk: a lookup on the network could only hang.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }

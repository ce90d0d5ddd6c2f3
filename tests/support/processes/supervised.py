"""Runs a supervisor over small Python scripts that say over a socket when they are ready."""

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil

from realsys.config.device_plan import Kind
from realsys.config.paths import TrialPaths
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.nodes.node_agent import NodeSignals, serve
from realsys.launch.nodes.orders import LOCAL, SupervisedNode
from realsys.launch.process_plan import TRAINING, OnDeath, ProcessSpec, needs_of
from realsys.launch.supervise.restart_policy import TrialOutcome
from realsys.launch.supervise.supervisor import Bounds, Hooks, Supervisor
from tests.conftest import shared_servers

READY = """
import os, signal, socket, sys
def ready():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + sys.argv[1])
        s.sendall(sys.argv[2].encode())
"""
OpenNodes = Callable[[Sequence[ProcessSpec]], AbstractAsyncContextManager[dict[str, SupervisedNode]]]
FOREVER = READY + "ready(); signal.pause()"
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nwhile True: signal.pause()"


class Trial:
    """Specs over scripts, and the socket on which they report. ``node``: where they run unless they say otherwise."""

    def __init__(self, folder: Path, node: str = LOCAL) -> None:
        self.folder = folder
        self.node = node
        self.recover = False
        self.notes: list[str] = []
        self.events: list[tuple[str, str]] = []  # kind and process of each note
        self.open_nodes: OpenNodes = in_process_agents
        self._ready: Counter[str] = Counter()  # reports that were not waited for yet
        self._heard = asyncio.Event()
        self.socket = f"realsys-test-{uuid.uuid4().hex}"  # abstract: no file, no limit on the folder's length

    def spec(self, kind: Kind, index: int, script: str) -> ProcessSpec:
        argv = (sys.executable, "-c", script, self.socket, f"{kind}/{index}")
        on_death: OnDeath = "restart" if kind not in TRAINING else "restart_training" if self.recover else "end"
        log = self.folder / f"{kind}-{index}.log"
        return ProcessSpec(kind, index, argv, log, on_death, node=self.node)

    def run(
        self,
        *specs: ProcessSpec,
        until: Sequence[str] = (),
        then: Callable[[Supervisor], Awaitable[None] | None] | None = None,
        stop_timeout_s: float = 60.0,
        min_share: float = 0.0,
        room_s: float = 600.0,
        **hooks: Any,
    ) -> TrialOutcome:
        """Run to the end; once every process in ``until`` is ready, call ``then``. Checks that no process is left.

        ``hooks``: of the supervisor, besides ``say``.
        """

        async def body() -> TrialOutcome:
            self._ready.clear()

            def on_ready() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(60)
                    self._ready[connection.recv(100).decode()] += 1
                self._heard.set()

            asyncio.get_running_loop().add_reader(server, on_ready)
            async with asyncio.timeout(90):
                bounds = Bounds(stop_timeout_s, stop_timeout_s / 2, 2, 0.01, min_share=min_share, room_s=room_s)
                async with self.open_nodes(specs) as nodes:
                    supervisor = Supervisor(specs, bounds, Hooks(say=self._note, **hooks), nodes)
                    running = asyncio.create_task(supervisor.run())
                    if then is not None:
                        await self.ready(*until)
                        while 0 in map(supervisor.running().get, until):  # noqa: ASYNC110 - no event tells its pid
                            await asyncio.sleep(0.01)
                        if (following := then(supervisor)) is not None:
                            await following
                    return await running

        before = _descendants()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("\0" + self.socket)
            server.listen()
            outcome = asyncio.run(body())
        assert _descendants() <= before | shared_servers
        return outcome

    async def ready(self, *names: str) -> None:
        """Return when each process has reported once more since the last call."""
        while not all(self._ready[name] for name in names):
            self._heard.clear()
            await self._heard.wait()
        self._ready.subtract(names)

    def _note(self, text: str, kind: str = "note", process: str = "") -> None:
        self.events.append((kind, process))
        if not text.startswith("waiting for the agents"):
            self.notes.append(text)


@contextlib.asynccontextmanager
async def in_process_agents(specs: Sequence[ProcessSpec]) -> AsyncIterator[dict[str, SupervisedNode]]:
    """Open the nodes of the specs. Agents of other nodes run in this process, until the supervisor ends them."""
    with tempfile.TemporaryDirectory() as folder:
        paths, names = TrialPaths(Path(folder)), needs_of(specs)
        async with open_nodes(names, paths, Terms("127.0.0.1", lease_s=60.0, join_s=60.0)) as nodes:
            agents = [asyncio.create_task(serve(paths, name, 60.0, NodeSignals())) for name in names if name != LOCAL]
            yield nodes
            assert await asyncio.gather(*agents) == [0] * len(agents)


def _descendants() -> set[int]:
    """Processes below this one that run."""
    running = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.add(process.pid)
    return running


def stop(supervisor: Supervisor) -> None:
    supervisor.interrupt(signal.SIGINT)


def log(trial: Trial, name: str) -> list[str]:
    return (trial.folder / f"{name.replace('/', '-')}.log").read_text().splitlines()


def waits_for(name: str) -> str:
    """Return a script that reports ready and continues at the signal."""
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.{name}}})\n"
    return READY + block + f"ready(); signal.sigwait({{signal.{name}}})\n"

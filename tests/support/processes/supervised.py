"""Runs a supervisor over small Python scripts that say over a socket when they are ready."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from realsys.launch.plan import TRAINING, Kind, OnDeath, ProcessSpec
from realsys.launch.processes.hooks import Bounds, Hooks
from realsys.launch.processes.restart_policy import Outcome
from realsys.launch.processes.supervisor import Supervisor

READY = """
import os, signal, socket, sys
def ready():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + sys.argv[1])
        s.sendall(sys.argv[2].encode())
"""
FOREVER = READY + "ready(); signal.pause()"
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nwhile True: signal.pause()"


class Trial:
    """Specs over scripts, and the socket on which they report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recover = False
        self.notes: list[str] = []
        self.socket = f"realsys-test-{uuid.uuid4().hex}"  # abstract: no file, no limit on the folder's length

    def spec(self, kind: Kind, index: int, script: str) -> ProcessSpec:
        argv = (sys.executable, "-c", script, self.socket, f"{kind}/{index}")
        on_death: OnDeath = "restart" if kind not in TRAINING else "restart_training" if self.recover else "end"
        return ProcessSpec(kind, index, argv, self.folder / f"{kind}-{index}.log", on_death)

    def run(
        self,
        *specs: ProcessSpec,
        until: Sequence[str] = (),
        then: Callable[[Supervisor], None] | None = None,
        stop_timeout_s: float = 5.0,
        min_share: float = 0.0,
        **hooks: Any,
    ) -> Outcome:
        """Run to the end; once every process in ``until`` is ready, call ``then``. Checks that no process is left.

        ``hooks``: of the supervisor, besides ``say``.
        """

        async def body() -> Outcome:
            waiting, all_ready = set(until), asyncio.Event()

            def on_ready() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(60)
                    waiting.discard(connection.recv(100).decode())
                if not waiting:
                    all_ready.set()

            asyncio.get_running_loop().add_reader(server, on_ready)
            async with asyncio.timeout(90):
                bounds = Bounds(stop_timeout_s, stop_timeout_s / 2, 2, first_backoff_s=0.01, min_share=min_share)
                supervisor = Supervisor(specs, bounds, Hooks(say=self.notes.append, **hooks))
                running = asyncio.create_task(supervisor.run())
                if then is not None:
                    await all_ready.wait()
                    then(supervisor)
                return await running

        before = {p.pid for p in psutil.Process().children(recursive=True)}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("\0" + self.socket)
            server.listen()
            outcome = asyncio.run(body())
        assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
        return outcome


def stop(supervisor: Supervisor) -> None:
    supervisor.interrupt(signal.SIGINT)


def log(trial: Trial, name: str) -> list[str]:
    return (trial.folder / f"{name.replace('/', '-')}.log").read_text().splitlines()


def waits_for(name: str) -> str:
    """Return a script that reports ready and continues at the signal."""
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.{name}}})\n"
    return READY + block + f"ready(); signal.sigwait({{signal.{name}}})\n"

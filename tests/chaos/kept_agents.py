"""The agents of a run over nodes, kept by the driver as a cluster would: one that has ended is started again."""

import contextlib
import itertools
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.support.processes.agents import start_agent
from tests.support.processes.forked import Command

_WAIT_S = 120.0  # time that an agent waits for a launcher
_JOIN_S = 20.0  # an agent that was started this short before the end of the run may not have joined it
_END_S = 30.0  # bound on the end of all agents after the run


class Agents:
    """Agents of one run; none if ``count`` is 0.

    Without spares a dead agent is started again under its name, like a machine that was booted again. With spares it
    gets a new name: the launcher gives its node to a spare when its lease is over.
    """

    def __init__(self, root: Path, count: int, folder: Path, env: Mapping[str, str], *, spares: bool) -> None:
        """``folder``: takes the output of each machine."""
        self._root = root
        self._folder = folder
        self._env = env
        self._spares = spares
        self._numbers = itertools.count()
        self._agents: dict[str, Command] = {}
        self._began: dict[str, float] = {}
        for _ in range(count):
            self._start(f"host{next(self._numbers)}")

    def _start(self, machine: str) -> None:
        output = self._folder / f"{machine}.txt"
        self._agents[machine] = start_agent(self._root, machine, output, _WAIT_S, env=self._env)
        self._began[machine] = time.monotonic()

    def tend(self) -> None:
        """Start an agent for each one that died. Code 0 means that the launcher has ended the run."""
        for machine, agent in list(self._agents.items()):
            if agent.poll():
                del self._agents[machine]
                self._start(f"host{next(self._numbers)}" if self._spares else machine)

    def pids(self) -> list[int]:
        return [agent.pid for agent in self._agents.values()]

    def of_nodes(self) -> Iterator[tuple[str, int]]:
        """Yield each node with the pid of its agent. The MasterWorker is on the first node."""
        for pid in self.pids():
            if workers := _workers_of(pid):
                yield f"node{int('master_worker' not in workers)}", pid

    def end(self) -> list[str]:
        """Wait for the end of all agents; return the problems."""
        now = time.monotonic()
        late = {machine for machine, began in self._began.items() if began > now - _JOIN_S}
        for machine in late & self._agents.keys():
            self._agents[machine].send_signal(signal.SIGTERM)
        problems = []
        for machine, agent in self._agents.items():
            try:
                code = agent.wait(max(0.0, now + _END_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                problems.append(f"agent {machine} did not end with the run")
                continue
            # the signal may meet an agent of a short run that has done its work, and no longer handles it
            if code and not (machine in late and code in (128 + signal.SIGTERM, -signal.SIGTERM)):
                problems.append(f"agent {machine} ended with code {code}")
        return problems

    def kill(self) -> None:
        """End the agents that are left, suspended ones too."""
        for agent in self._agents.values():
            agent.kill()
            agent.wait()

    def report(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.outputs())

    def outputs(self) -> list[Path]:
        return sorted(self._folder.glob("host*.txt"))


def _workers_of(pid: int) -> set[str]:
    """Return the kinds of the workers that are children of an agent."""
    kinds = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--trial-dir" in (words := child.cmdline()):  # a fork server names the modules of workers, too
                    kinds |= {word.rpartition(".")[2] for word in words if word.startswith("realsys.workers.")}
    return kinds

"""The launcher ``ray``: one actor per node of the trial in a Ray cluster, each with a node agent as child process.

    launcher ──Task──> driver (ray_driver.py) ──> placement group ──> actor ──> realsys node-agent
             <─Report─         │
             end of input ─────┴──> agents, actors and placement group end

This module imports no Ray: the driver does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from realsys.cluster.child_process import ChildProcess, how_it_ended
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.launchers.base import Launcher
from realsys.launch.launchers.ray_bundles import bundle_of, shortage
from realsys.launch.launchers.ray_messages import Report, Task
from realsys.launch.nodes.orders import KILL_MARGIN_S
from realsys.launch.process_plan import own_python_path

_DRIVER = (sys.executable, "-P", "-m", "realsys.launch.launchers.ray_driver")
_LOOK_S = 30.0  # Ray itself tries for more than 40 s to reach a cluster that does not answer
_AGENT_START_S = 60.0  # bound on the time from the start of an agent to its join
_STOP_MARGIN_S = 15.0  # time for the driver after the time that the agents have
_ADDRESS = "cluster.ray.address"


class RayLauncher(Launcher):
    """Agents in the placement group of a Ray cluster."""

    def __init__(self, config: Config, paths: TrialPaths) -> None:
        super().__init__(config, paths)
        self._driver: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._problem = ""
        self._stopping = False

    @classmethod
    def check(cls, config: Config) -> None:
        """Ask the cluster for its nodes, and compare them with those that the trial needs. Raises ConfigError."""
        cluster, address = config.cluster, config.cluster.ray.address
        if not cluster.nodes:
            raise ConfigError("cluster.nodes", 0, "Ray needs the number of nodes: set it, and cluster.gpus_per_node")
        if cluster.cpu_nodes:
            raise ConfigError("cluster.cpu_nodes", cluster.cpu_nodes, "must be 0: the nodes of a Ray trial are equal")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("cluster.launcher", cluster.launcher, "Ray is not installed: pip install 'realsys[ray]'")
        if address.startswith("ray://"):
            problem = "is the address of Ray Client: start the run on a node of the cluster, or with `ray job submit`"
            raise ConfigError(_ADDRESS, address, problem)
        found = _look(Task(address, cluster.ray.namespace))
        if found.problem:
            raise ConfigError(_ADDRESS, address, found.problem)
        lack = shortage(bundle_of(cluster), cluster.machines, found.nodes)
        if lack and not cluster.ray.autoscaler:
            spares = f" with cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
            raise ConfigError("cluster.nodes", cluster.nodes, f"does not fit the Ray cluster{spares}: {lack}")

    def join_timeout_s(self) -> float:
        return self.config.cluster.ray.timeout_s + _AGENT_START_S

    async def start(self, agent: Sequence[str], say: Callable[[str], None]) -> None:
        cluster = self.config.cluster
        task = Task(
            address=cluster.ray.address,
            namespace=cluster.ray.namespace,
            agent=list(agent),
            bundle=bundle_of(cluster),
            count=self.machines,
            needed=cluster.nodes,
            title=f"realsys-{self.config.experiment}-{self.config.trial}",
            logs=str(self.paths.logs),
            timeout_s=cluster.ray.timeout_s,
            restarts=cluster.max_restarts,
            settle_s=cluster.lease_s + KILL_MARGIN_S,
            stop_s=cluster.stop_timeout_s,
        )
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        self._driver = ChildProcess(_DRIVER, _environment(), subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._driver.popen.stdin is not None
        self._driver.popen.stdin.write(msgspec.json.encode(task) + b"\n")
        self._driver.popen.stdin.flush()
        self._reader = asyncio.create_task(self._read(self._driver, say), name="Ray driver")

    def problem(self) -> str:
        return self._problem

    async def stop(self) -> None:
        self._stopping = True
        driver, self._driver = self._driver, None
        if driver is None:
            return
        assert driver.popen.stdin is not None and self._reader is not None
        with contextlib.suppress(BrokenPipeError):
            driver.popen.stdin.close()
        if not await driver.exits_within(self.config.cluster.stop_timeout_s + _STOP_MARGIN_S):
            driver.kill()  # Ray ends its actors, because they belong to its job
            await driver.exits_within(None)
        await self._reader
        driver.reap()

    async def _read(self, driver: ChildProcess, say: Callable[[str], None]) -> None:
        """Handle the reports of the driver to its end."""
        assert driver.popen.stdout is not None
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), driver.popen.stdout)
        last = ""
        try:
            while line := await stream.readline():
                try:
                    report = msgspec.json.decode(line, type=Report)
                except msgspec.MsgspecError:  # Python's last words
                    last = line.decode("utf-8", "replace").strip() or last
                    continue
                self._problem = report.problem or self._problem
                if text := report.say or report.problem:
                    say(text)
        finally:
            transport.close()
        if not self._stopping:
            await driver.exits_within(None)
            self._problem = self._problem or f"the Ray driver ended: {last or f'see {self.paths.logs}/ray_driver.log'}"
            say(self._problem)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": own_python_path(os.environ.get("PYTHONPATH", ""))}


def _look(task: Task) -> Report:
    """Return the live nodes of a Ray cluster, or the problem."""
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "timeout": _LOOK_S,
        "env": _environment(),
    }
    try:
        driver = subprocess.run(_DRIVER, input=msgspec.json.encode(task) + b"\n", **options)
    except subprocess.TimeoutExpired:
        return Report(problem=f"no Ray cluster answers within {_LOOK_S:g} s: start the run on a node of the cluster")
    lines = driver.stdout.splitlines()
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=Report)
    last = lines[-1].decode("utf-8", "replace") if lines else "no output"
    return Report(problem=f"Ray {how_it_ended(driver.returncode)}: {last}")

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
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys.cluster.children.child_process import ChildProcess, how_it_ended, lines_of
from realsys.cluster.process import own_environment
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError
from realsys.launch.launchers.contract import Launcher
from realsys.launch.nodes.orders import KILL_MARGIN_S

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
        found = _look(DriverTask(address))
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
        task = DriverTask(
            address=cluster.ray.address,
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
        self._driver = ChildProcess(_DRIVER, own_environment(), subprocess.PIPE, stdin=subprocess.PIPE)
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
        await self._reader
        await driver.end(None)

    async def _read(self, driver: ChildProcess, say: Callable[[str], None]) -> None:
        """Handle the reports of the driver to its end."""
        assert driver.popen.stdout is not None
        last = ""
        async for line in lines_of(driver.popen.stdout):
            try:
                report = msgspec.json.decode(line, type=DriverReport)
            except msgspec.MsgspecError:  # Python's last words
                last = line.decode("utf-8", "replace").strip() or last
                continue
            self._problem = report.problem or self._problem
            if text := report.say or report.problem:
                say(text)
        if not self._stopping:
            await driver.exits_within(None)
            self._problem = self._problem or f"the Ray driver ended: {last or f'see {self.paths.logs}/ray_driver.log'}"
            say(self._problem)


def _look(task: DriverTask) -> DriverReport:
    """Return the live nodes of a Ray cluster, or the problem."""
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "timeout": _LOOK_S,
        "env": own_environment(),
    }
    try:
        driver = subprocess.run(_DRIVER, input=msgspec.json.encode(task) + b"\n", **options)
    except subprocess.TimeoutExpired:
        return DriverReport(
            problem=f"no Ray cluster answers within {_LOOK_S:g} s: start the run on a node of the cluster"
        )
    lines = driver.stdout.splitlines()
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=DriverReport)
    last = lines[-1].decode("utf-8", "replace") if lines else "no output"
    return DriverReport(problem=f"Ray {how_it_ended(driver.returncode)}: {last}")


# ---- resources that a trial needs of a Ray cluster, and whether its nodes have them. Pure
#
# A *bundle* is Ray's word for the resources of one node of the trial. The bundles of a placement group STRICT_SPREAD
# lie on different Ray nodes, so a cluster can hold the trial if enough nodes have one bundle each.


Resources = Mapping[str, float]

_MOST_NAMED = 4  # nodes that a message names
_GIB = 2**30
_MEMORY = "memory"  # Ray counts it in bytes


@dataclass(frozen=True, slots=True)
class RayNode:
    """A live node of a Ray cluster, with all its resources and those that nothing uses."""

    node_id: str
    host: str
    total: dict[str, float]
    free: dict[str, float] = field(default_factory=dict)


def bundle_of(cluster: ClusterConfig) -> dict[str, float]:
    """Return the resources of one node of a trial. Without ``cluster.cpus_per_node`` it asks for one core."""
    memory = int(cluster.memory_gb_per_node * _GIB)
    own = {"CPU": float(cluster.cpus_per_node or 1), "GPU": float(cluster.gpus_per_node), _MEMORY: float(memory)}
    return {name: amount for name, amount in {**own, **cluster.ray.resources}.items() if amount}


def shortage(bundle: Resources, count: int, nodes: Sequence[RayNode], *, free: bool = False) -> str:
    """Return what the nodes lack for ``count`` bundles, with the numbers; "" if they can hold them.

    free   count only what nothing uses
    """
    offers = {node.node_id: node.free if free else node.total for node in nodes}
    short = [node for node in nodes if not _holds(offers[node.node_id], bundle)]
    fit = len(nodes) - len(short)
    if fit >= count:
        return ""
    named = [f"{node.host} has {as_text(bundle, offers[node.node_id])}" for node in short[:_MOST_NAMED]]
    named += [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
    rest = f" ({'; '.join(named)})" if named else ""
    having = "have that free" if free else "have that"
    needed = f"1 node with {as_text(bundle)} is" if count == 1 else f"{count} nodes with {as_text(bundle)} each are"
    return f"{needed} needed, {fit} of {len(nodes)} {having}{rest}"


def as_text(bundle: Resources, amounts: Resources | None = None) -> str:
    """Return the ``amounts`` of the resources that a bundle names, by default its own: ``CPU 8, memory 64 GiB``."""
    values = bundle if amounts is None else amounts
    return ", ".join(f"{name} {_amount(name, values.get(name, 0.0))}" for name in bundle)


def agent_name(host: str, node_id: str, hosts: Sequence[str]) -> str:
    """Return the name of an agent: its host, with a part of the Ray node's id if several nodes run on one host."""
    return host if hosts.count(host) < 2 else f"{host}-{node_id[:6]}"


def _holds(offer: Resources, bundle: Resources) -> bool:
    return all(offer.get(name, 0.0) >= amount for name, amount in bundle.items())


def _amount(name: str, value: float) -> str:
    return f"{value / _GIB:.4g} GiB" if name == _MEMORY else f"{value:g}"


# ---- messages between the Ray launcher and its driver, one JSON object per line


class DriverTask(msgspec.Struct, frozen=True):
    """The only message to the driver. The end of its input means: stop.

    agent       command of an agent; empty: only describe the cluster
    bundle      resources of one node
    count       number of nodes, with the spares
    needed      number of nodes that the run must have
    title       name of the placement group
    logs        folder of the agents' output, shared
    timeout_s   time that a node may take to get free
    restarts    agents in a row that may end by a signal, or with their actor, on one bundle
    settle_s    time after which the processes of an agent that was killed have ended
    stop_s      time that an agent has to end
    """

    address: str
    agent: list[str] = []
    bundle: dict[str, float] = {}
    count: int = 0
    needed: int = 0
    title: str = ""
    logs: str = ""
    timeout_s: float = 0.0
    restarts: int = 0
    settle_s: float = 0.0
    stop_s: float = 0.0


class DriverReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the driver.

    say       line for the user
    problem   why the trial cannot get its agents any more
    nodes     live nodes of the cluster
    """

    say: str = ""
    problem: str = ""
    nodes: list[RayNode] = []

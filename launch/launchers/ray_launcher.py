"""The launcher ``ray``: one actor per node of the trial in a Ray cluster, each with a node agent as child process.

    launcher ──Task──> driver (below) ──> placement group ──> actor ──> realsys node-agent
             <─Report─         │
             end of input ─────┴──> agents, actors and placement group end

Only the driver imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from realsys.cluster.children.child_process import Backoff, ChildProcess, how_it_ended, lines_of
from realsys.cluster.process import own_environment
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError
from realsys.launch.launchers import ray_actor
from realsys.launch.launchers.contract import Launcher
from realsys.launch.nodes.orders import KILL_MARGIN_S

_DRIVER = (sys.executable, "-P", "-m", "realsys.launch.launchers.ray_launcher")
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


# ---- driver of a trial on a Ray cluster: a child process of the launcher, as `srun` is on SLURM
#
#     Task ──> ray.init ──> placement group STRICT_SPREAD ──> per bundle: actor ──> agent ──> its end
#                                                                 ^                            │ by a signal, or with
#                                                                 └──────── next actor ────────┘ its actor or node
#
# consumes     one Task; the end of its input means: stop
# produces     Reports on its output; everything that Ray prints goes to its log
# waits for    a free node for each bundle, within a bound; the end of each agent
# ends with    no agent, no actor and no placement group. If it is killed, Ray removes them: they belong to its job
#
# It is not part of the launcher, because a Ray driver ends its process when Ray's head node is gone, handles signals,
# and starts threads. The launcher must not end before the last checkpoint.
#
# If a node dies, Ray places its bundle on another node as soon as there is one. The next actor of the bundle waits
# there.


_T = TypeVar("_T")

LOG = "ray_driver.log"
_POLL_S = 2.0  # time that one call of an actor waits for the end of its agent
_UNREACHABLE_S = 1.0  # before an actor that cannot be reached is called again
_FIRST_DELAY_S = 0.5
_EXIT_S = 10.0  # bound on the exit of this process after the agents have ended


class _Lost(Exception):
    """The agent ended, and a new one can replace it. ``here``: its node lives, so the new one may start there."""

    def __init__(self, text: str, *, here: bool) -> None:
        super().__init__(text)
        self.here = here


class _Final(Exception):
    """No agent can come for this bundle."""


class Driver:
    """One trial on a Ray cluster."""

    def __init__(self, task: DriverTask, report: Callable[[DriverReport], None]) -> None:
        self._task = task
        self._report = report
        self._group: Any = None
        self._actors: dict[int, Any] = {}  # bundle -> its newest actor
        self._given_up = 0  # number of bundles that get no agent any more
        self._on: dict[int, str] = {}  # bundle -> id of the Ray node on which its agent runs

    async def run(self, stopped: asyncio.Event) -> None:
        """Keep an agent on every bundle until each has ended or ``stopped`` is set."""
        from ray.util.placement_group import placement_group

        task = self._task
        self._group = placement_group([task.bundle] * task.count, strategy="STRICT_SPREAD", name=task.title)
        keepers = [asyncio.create_task(self._keep(index)) for index in range(task.count)]
        await stopped.wait()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        from ray.util.placement_group import remove_placement_group

        ends = [asyncio.ensure_future(_awaited(self._actors[i].end.remote(self._task.stop_s))) for i in self._on]
        if ends:
            await asyncio.wait(ends, timeout=self._task.stop_s + _POLL_S)
        for index in list(self._actors):
            self._kill(index)
        remove_placement_group(self._group)

    async def _keep(self, index: int) -> None:
        backoff = Backoff(self._task.restarts, _FIRST_DELAY_S)
        while True:
            started = time.monotonic()
            try:
                await self._one_agent(index)
                return
            except _Final as exc:
                self._give_up(index, str(exc))
                return
            except _Lost as exc:
                self._kill(index)
                delay = backoff.next_delay(time.monotonic() - started)
                if delay is None:
                    self._give_up(index, f"{exc}; that was try {backoff.restarts + 1}")
                    return
                self._report(DriverReport(say=f"{exc}; another one starts when Ray has a node for it"))
                # Its processes may still be ending. On another node the coordinator waits for the end of the lease.
                await asyncio.sleep(max(delay, self._task.settle_s) if exc.here else delay)
            except Exception as exc:  # the boundary of a task
                self._give_up(index, f"{type(exc).__name__}: {exc}")
                raise

    def _give_up(self, index: int, why: str) -> None:
        self._kill(index)
        self._given_up += 1
        enough = self._task.count - self._given_up >= self._task.needed
        self._report(DriverReport(say=why) if enough else DriverReport(problem=why))

    async def _one_agent(self, index: int) -> None:
        """Run one agent to its end. Raises _Lost, _Final."""
        # an actor for the whole bundle, so that Ray gives it the ids of all its GPUs
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rest = dict(self._task.bundle)
        options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
        if memory := rest.pop("memory", 0):
            options["memory"] = memory
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        remote: Any = ray.remote(ray_actor.AgentActor)
        self._actors[index] = actor = remote.options(
            **options, resources=rest, scheduling_strategy=place, max_restarts=0
        ).remote()
        host, node_id = await self._placed(actor.where.remote())
        hosts = [node.host for node in live_nodes()]
        name = agent_name(host, node_id, hosts)
        log = f"{self._task.logs}/node_agent-{name}.log"
        if problem := await _answer(actor.start.remote([*self._task.agent, "--node", name], log), name, node_id):
            raise _Final(f"Ray node {name}: {problem}")
        self._on[index] = node_id
        self._report(DriverReport(say=f"Ray started the agent of {name}"))
        while (code := await _ended(actor, name, node_id)) is None:
            pass
        if code < 0:
            raise _Lost(f"the agent of {name} {how_it_ended(code)}", here=True)
        if code > 0:
            raise _Final(f"the agent of {name} {how_it_ended(code)}: see {log}")

    async def _placed(self, where: Awaitable[_T]) -> _T:
        """Return the answer of a new actor. Raises _Final if Ray has no node for it within the bound."""
        task = self._task
        try:
            async with asyncio.timeout(task.timeout_s):
                return await _answer(where, "a new actor")
        except TimeoutError:
            others = [node for node in live_nodes() if node.node_id not in self._on.values()]
            lack = shortage(task.bundle, task.count - len(self._on), others, free=True)
            why = lack or "the nodes are there, but Ray started no worker process on them"
            raise _Final(f"Ray placed no agent within {task.timeout_s:g} s (cluster.ray.timeout_s): {why}") from None

    # ---- the end

    def _kill(self, index: int) -> None:
        import ray

        self._on.pop(index, None)
        with contextlib.suppress(Exception):  # it is dead already, or its node is
            ray.kill(self._actors.pop(index))


async def _awaited(reply: Awaitable[_T]) -> _T:
    return await reply


async def _answer(reply: Awaitable[_T], name: str, node_id: str = "") -> _T:
    """Return the answer of an actor. Raises _Lost if the actor or its node died."""
    from ray.exceptions import RayError

    try:
        return await reply
    except RayError as exc:
        here = node_id in {node.node_id for node in live_nodes()}
        cause = "its Ray node died" if node_id and not here else _cause(exc)
        raise _Lost(f"the agent of {name} was lost: {cause}", here=here) from exc


async def _ended(actor: Any, name: str, node_id: str) -> int | None:
    """Return the exit code of an agent, or None while it runs. An actor that cannot be reached may still run."""
    from ray.exceptions import ActorUnavailableError

    try:
        return await _answer(actor.wait.remote(_POLL_S), name, node_id)
    except _Lost as lost:
        if not isinstance(lost.__cause__, ActorUnavailableError):
            raise
    await asyncio.sleep(_UNREACHABLE_S)
    return None


def _cause(exc: Exception) -> str:
    lines = str(exc).splitlines() or [type(exc).__name__]
    return next((line.strip() for line in lines if "because" in line), lines[0])


def live_nodes() -> list[RayNode]:
    """Return the live nodes of the cluster."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray has no public function for it

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        RayNode(node["NodeID"], node["NodeManagerHostname"], node["Resources"], free.get(node["NodeID"], {}))
        for node in alive
    ]


def main() -> int:
    """Entry point of the process."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    # `ray job stop` signals every process; the launcher decides about the end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def report(message: DriverReport) -> None:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone: the end of the input follows
            reports.write(msgspec.json.encode(message) + b"\n")

    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=DriverTask)
    with open(f"{task.logs}/{LOG}" if task.logs else os.devnull, "ab") as log:  # what Ray prints is no report
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if problem := _connect(task):
        report(DriverReport(problem=problem))
        return 1
    if not task.agent:
        report(DriverReport(nodes=live_nodes()))
        return 0
    asyncio.run(_until_stopped(Driver(task, report)))
    return 0


def _connect(task: DriverTask) -> str:
    """Connect to the cluster. Returns the problem, or ""."""
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(ray_actor)
    try:
        ray.init(task.address, log_to_driver=False, logging_level="WARNING")
    except (Exception, SystemExit) as exc:  # Ray raises many kinds
        return " ".join(f"{type(exc).__name__}: {exc}".split())[:500]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # Ray has set its own handler
    return ""


async def _until_stopped(driver: Driver) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(stopped.set)

    loop.run_in_executor(None, watch)
    await driver.run(stopped)


if __name__ == "__main__":
    code = main()
    signal.alarm(int(_EXIT_S))  # kills a process whose exit hangs in Ray
    sys.exit(code)

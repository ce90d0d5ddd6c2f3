"""Driver of a trial on a Ray cluster: a child process of the launcher, as `srun` is on SLURM.

    Task ──> ray.init ──> placement group STRICT_SPREAD ──> per bundle: actor ──> agent ──> its end
                                                                ^                            │ by a signal, or with
                                                                └──────── next actor ────────┘ its actor or node

consumes     one Task; the end of its input means: stop
produces     Reports on its output; everything that Ray prints goes to its log
waits for    a free node for each bundle, within a bound; the end of each agent
ends with    no agent, no actor and no placement group. If it is killed, Ray removes them: they belong to its job

It is not part of the launcher, because a Ray driver ends its process when Ray's head node is gone, handles signals, and
starts threads. The launcher must not end before the last checkpoint.

If a node dies, Ray places its bundle on another node as soon as there is one. The next actor of the bundle waits there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from realsys.cluster.children.child_process import Backoff, how_it_ended
from realsys.launch.launchers import ray_actor
from realsys.launch.launchers.ray_launcher import DriverReport, DriverTask, RayNode, agent_name, shortage

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
        await self._stop()

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
        self._actors[index] = actor = self._make(index)
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

    def _make(self, index: int) -> Any:
        """Return an actor for the whole bundle, so that Ray gives it the ids of all its GPUs. It starts later."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        rest = dict(self._task.bundle)
        options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0)}
        if memory := rest.pop("memory", 0):
            options["memory"] = memory
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        remote: Any = ray.remote(ray_actor.AgentActor)
        return remote.options(**options, resources=rest, scheduling_strategy=place, max_restarts=0).remote()

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

    async def _stop(self) -> None:
        from ray.util.placement_group import remove_placement_group

        ends = [asyncio.ensure_future(_awaited(self._actors[i].end.remote(self._task.stop_s))) for i in self._on]
        if ends:
            await asyncio.wait(ends, timeout=self._task.stop_s + _POLL_S)
        for index in list(self._actors):
            self._kill(index)
        remove_placement_group(self._group)

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

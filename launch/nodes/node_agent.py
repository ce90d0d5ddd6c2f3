"""Run on each other machine of a trial: start and watch the processes that its launcher orders, and end with it.

    looks for the coordinator's file ──> Joined ───Ping───> joined ──┬─End──> kills everything, exits 0
                  ^                                                  ├─another agent took its place──> same, exits 1
                  └───────────────────────kills everything───────────┴─no Ping for the lease

It executes the orders of the coordinator and decides nothing.

`agent-ends-first` (coordinator.py): without a coordinator no process of this node lives longer than the lease. A
coordinator that is started again writes a new file, and the agent joins that one. With ``once`` it ends instead: the
launcher starts new agents for each coordinator, and one that is left of an earlier run must not take a node from them.

A batch system sends SIGTERM to all tasks together. The ranks must live on until the MasterWorker has its checkpoint. So
the agent passes the signal on to the coordinator, which stops the run in the right order, within its own bounds, and
sends End. If no coordinator is heard, the agent ends at the signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from realsys.cluster import failpoint
from realsys.cluster.network import interfaces, own_addresses
from realsys.cluster.prctl import die_with_parent
from realsys.cluster.process import PARENT_PID, configure_logging
from realsys.cluster.stream.security import load_keys
from realsys.cluster.stream.worker_endpoint import WorkerEndpoint, WorkerRequest
from realsys.config.machine import free_host_bytes, gpu_bytes, own_gpus
from realsys.config.paths import TrialPaths
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError, DecodeError, Fenced, RealsysError, StreamError, WaitTimeout
from realsys.launch.commands.options import preload_workers, seconds
from realsys.launch.nodes import orders, preload
from realsys.launch.nodes.coordinator import PINGS_PER_LEASE
from realsys.launch.nodes.local_executor import Executor, open_executor
from realsys.launch.nodes.orders import Exit, Process, ProcessOrder
from realsys.launch.supervise.stop_request import stop_signals
from realsys.weights.host_places import sweep

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # seconds between two reads of the coordinator's file
_KILL_TIMEOUT_S = 2.0
_IMPORTS_S = 60.0  # bound on the wait for the imports of the fork servers


class AgentEndpoint(WorkerEndpoint):
    """The agent's end of the stream."""

    kind = "node_agent"


class LostCoordinator(WaitTimeout):
    """The agent lost its coordinator and found no other. The exit code tells a batch system that its job has none."""

    exit_code = 3


class CoordinatorLease:
    """The time until which the agent may have processes."""

    def __init__(self) -> None:
        self._until = math.inf  # no process is started before the first Pong has arrived
        self._replied = 0.0
        self._lease_s = 0.0

    @staticmethod
    def now() -> float:
        """Return the time in seconds. The time of a suspension of the machine counts: the coordinator lives on."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def left_s(self) -> float:
        """Seconds until the end of the lease; below 0 after it."""
        return self._until - self.now()

    @property
    def quiet(self) -> bool:
        """True if two Pings in a row are missing, or there was none."""
        return self.now() > self._replied + 2 * self._lease_s / PINGS_PER_LEASE

    def renew(self, lease_s: float) -> None:
        """Handle a Ping: the coordinator has the Pong before it. Call it right before the next Pong."""
        self._until = (self._replied or self.now()) + lease_s
        self._lease_s = lease_s
        self._replied = self.now()

    def check(self) -> None:
        """Raise Fenced after the end of the lease."""
        if self.left_s < 0:
            raise Fenced(f"the coordinator was not heard for {self._lease_s:g} s: this node's processes end")


class NodeAgent:
    """One session with a coordinator. ``run`` returns when it is over, and no process is left then."""

    def __init__(self, executor: Executor, endpoint: WorkerEndpoint, lease: CoordinatorLease) -> None:
        self.ended = False  # the coordinator has sent End
        self.replaced = False  # the coordinator has heard a newer agent of this name
        self.asked = 0  # signal that asked this node to stop
        self._executor = executor
        self._endpoint = endpoint
        self._lease = lease
        self._processes: dict[int, Process] = {}
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._reader = threading.Thread(target=self._read, name="orders", daemon=True)

    @property
    def joined(self) -> bool:
        """True once the coordinator was heard."""
        return self._lease.left_s < math.inf

    async def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Serve until the coordinator's End, the end of the lease, or a successor.

        Until the coordinator is heard, the session also ends when ``wanted`` returns False.
        """
        self._reader.start()
        try:
            while not self._over.is_set() and self._lease.left_s > 0 and (self.joined or wanted()):
                await self._until_over(self._lease.left_s if self.joined else _LOOK_S)
        finally:
            self._over.set()
            if not self.ended:
                await self._executor.end(_KILL_TIMEOUT_S)
            sweep()  # a server that was killed leaves its copy of the weights in /dev/shm
            await asyncio.to_thread(self._endpoint.close)
            await asyncio.to_thread(self._reader.join)

    async def _until_over(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()

    def stop(self, signum: int) -> None:
        """Handle a signal that asks this node to stop."""
        self.asked = signum
        name = signal.Signals(signum).name
        if self._lease.quiet:
            log.warning("%s: no coordinator is heard: ending all processes", name)
            self._over.set()
            return
        log.warning("%s: passed on to the coordinator, which ends the run", name)
        with contextlib.suppress(StreamError):  # the session is over
            self._endpoint.notify("StopAsked", orders.StopAsked(self._endpoint.index, signum))

    # ---- orders

    def _read(self) -> None:
        """Hand the orders to the event loop. The body of a thread."""
        try:
            while True:
                if request := self._endpoint.next_request(_LOOK_S):
                    self._on_loop(self._obey, request)
        except StreamError:  # refused, or closed at the end of ``run``
            self._on_loop(self._refused)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _refused(self) -> None:
        self.replaced = not self._over.is_set() and self._lease.left_s > 0
        self._over.set()

    def _obey(self, request: WorkerRequest) -> None:
        # This process may have been suspended since the order arrived.
        if self._over.is_set() or self._lease.left_s < 0:
            return
        try:
            match request.handler:
                case "Ping":
                    self._lease.renew(request.decode(orders.Ping).lease_s)
                    self._endpoint.reply(request, orders.Pong(self._endpoint.incarnation))
                case "Start":
                    self._endpoint.reply(request, orders.Started(self._start(request.decode(orders.Start))))
                case "SendSignal":
                    self._signal(request.decode(orders.SendSignal))
                    self._endpoint.reply(request, orders.Done())
                case "EndRun":
                    order = request.decode(orders.EndRun)
                    self._ending = asyncio.create_task(self._end(request, order))
                case _:
                    raise RealsysError(f"unknown order {request.handler!r}: run the same realsys on all nodes")
        except StreamError:
            self._over.set()
        except Exception as exc:  # the boundary of a request
            self._failed(request, exc)

    def _failed(self, request: WorkerRequest, exc: Exception) -> None:
        """Handle the failure of an order: the coordinator ends the run.

        An order that cannot be read ends only this session: the agent kills its processes and joins again. But if it is
        the first order of a session, the coordinator runs another realsys.
        """
        log.error("%s failed", request.handler, exc_info=exc)
        if isinstance(exc, DecodeError) and self.joined:
            self._over.set()
            return
        with contextlib.suppress(StreamError):
            self._endpoint.reply_error(request, exc)

    def _start(self, order: orders.Start) -> int:
        if order.incarnation != self._endpoint.incarnation:
            return 0

        def exited(ended: Exit) -> None:
            self._processes.pop(order.serial, None)
            if self._over.is_set():  # it ends with this session: its own end is not the cause
                return
            with contextlib.suppress(StreamError):  # the session is over: the coordinator knows that all have ended
                about = (ended.returncode, ended.time, ended.log_end, ended.problem)
                self._endpoint.notify("Exited", orders.Exited(self._endpoint.index, order.serial, *about))

        log_settings = (Path(order.log), order.log_bytes, order.keep_last_words)
        process = self._executor.start(
            ProcessOrder(tuple(orders.with_python(order.argv)), order.env, *log_settings, gpus=tuple(order.gpus)),
            exited,
        )
        if process.pid:
            self._processes[order.serial] = process
        return process.pid

    def _signal(self, order: orders.SendSignal) -> None:
        process = self._processes.get(order.serial)
        if process is None:  # it has just ended
            return
        if order.group:
            process.kill()
        else:
            process.signal(order.number)

    async def _end(self, request: WorkerRequest, order: orders.EndRun) -> None:
        killed = await self._executor.end(order.timeout_s)
        with contextlib.suppress(StreamError):
            self._endpoint.reply(request, orders.AllEnded(killed))
        self.ended = True
        self._over.set()


# ---- the command


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trial-dir", type=Path, metavar="DIR", required=True, help="folder of the trial, shared")
    parser.add_argument(
        "--node",
        metavar="NAME",
        default=socket.gethostname(),
        help="name of this machine, unique (default: its host name)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        default=600.0,
        help="seconds to wait for the launcher (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="end when the trial is started again")


def run(args: Namespace) -> int:
    """Run the agent of a machine until the run has ended. Returns the exit code. Raises RealsysError."""
    preload_workers(args)
    node = args.node
    configure_logging(f"node_agent/{node}")
    failpoint.arm(f"node_agent/{node}")
    # Its own processes then get SIGTERM. At SIGTERM the agent would ask the coordinator to end the run.
    parent = os.environ.get(PARENT_PID)
    if parent is not None and not die_with_parent(signal.SIGKILL, int(parent)):
        raise Fenced(f"the process that started this agent (pid {parent}) has ended already")
    # The stream's thread ends with the session: refused by the coordinator, or the lease is over.
    threading.excepthook = lambda args: log.error("%s", args.exc_value)

    paths = TrialPaths(args.trial_dir.resolve())

    async def body() -> int:
        signals = NodeSignals()
        with stop_signals(signals.handle):
            return await serve(paths, node, args.wait, signals, once=args.once)

    return asyncio.run(body())


class NodeSignals:
    """Stop signals of this process. They go to the agent; ``asked`` is the last one that came without an agent."""

    def __init__(self) -> None:
        self.agent: NodeAgent | None = None
        self.asked = 0

    def handle(self, number: int) -> None:
        """Handle one signal, on the event loop."""
        if self.agent is not None:
            self.agent.stop(number)
        else:
            self.asked = number


async def serve(paths: TrialPaths, name: str, wait_s: float, signals: NodeSignals, *, once: bool = False) -> int:
    """Serve one coordinator after another, until one of them ends the run. Returns the exit code.

    ``once``: serve the first one only, which may be lost and heard again. Each wait for a coordinator is bounded by
    ``wait_s``. Raises WaitTimeout, ConfigError if the folder of the trial is missing, and Fenced if another agent has
    the place.
    """
    gpu_memory = await asyncio.to_thread(_gpu_memory)  # the driver may take seconds to answer
    async with open_executor() as executor:
        # The agent joins after the imports: a process that is started before would make the same imports once more.
        imports_until = CoordinatorLease.now() + _IMPORTS_S
        while not signals.asked and CoordinatorLease.now() < imports_until:
            if not preload.is_importing():
                break
            await asyncio.sleep(_LOOK_S)
        deadline, served = CoordinatorLease.now() + wait_s, ""
        while (address := await _find(paths, deadline, signals, had_one=bool(served))) is not None:
            if once and served not in ("", address.coordinator):
                raise Fenced("another coordinator runs the trial, with agents of its own")
            wanted = functools.partial(_is_valid, paths.coordinator, address, deadline)
            lease = CoordinatorLease()
            keys = load_keys(paths.keys)
            endpoint = AgentEndpoint(orders.index_of(name), address.address, keys=keys, check_alive=lease.check)
            reached, problem = "", ""
            gpus: tuple[str, ...] = ()
            try:
                gpus = own_gpus()
                cluster = ClusterConfig(host=address.host, interface=address.interface, nodes=address.machines)
                _, reached, _ = own_addresses(cluster, os.environ, interfaces())
            except ConfigError as error:
                problem = f"{name}: {error}"
            cpus = len(os.sched_getaffinity(0))
            machine = (socket.gethostname(), reached, cpus, free_host_bytes(), len(gpus), gpu_memory)
            endpoint.notify("Joined", orders.Joined(endpoint.index, endpoint.incarnation, name, *machine, problem))
            agent = signals.agent = NodeAgent(executor, endpoint, lease)
            await agent.run(wanted)
            signals.agent = None
            if agent.ended:
                log.info("the coordinator has ended the run")
                return 0
            if agent.replaced:
                raise Fenced(f"another agent named {name} took this one's place")
            signals.asked = agent.asked
            if agent.joined:
                served = address.coordinator
                log.warning("the coordinator is gone: all processes have ended; waiting %g s for another one", wait_s)
                deadline = CoordinatorLease.now() + wait_s
    return 128 + signals.asked


def _gpu_memory() -> int:
    """Return the bytes of the smallest GPU of this process; 0 if they are not known."""
    try:
        return gpu_bytes(own_gpus())
    except ConfigError:  # part of the introduction
        return 0


async def _find(paths: TrialPaths, deadline: float, signals: NodeSignals, *, had_one: bool) -> orders.Address | None:
    """Return the address of the coordinator, None after a signal. Raises after ``deadline`` (``_not_found``)."""
    while not signals.asked:
        if CoordinatorLease.now() > deadline:  # also if there is a file: a coordinator that was killed leaves it
            raise _not_found(paths, had_one=had_one)
        if address := orders.read_address(paths.coordinator):
            return address
        await asyncio.sleep(_LOOK_S)
    return None


def _not_found(paths: TrialPaths, *, had_one: bool) -> RealsysError:
    """Return the error of an agent that finds no coordinator.

    Only an agent that had one may report a job without a launcher: else the launcher may live, and the agent cannot
    see its file or reach it. The job would be queued again for ever.
    """
    problem = f"no coordinator in {paths.coordinator}: start the run, or correct --trial-dir"
    if had_one:
        return LostCoordinator(problem)
    if not paths.root.is_dir():
        remedy = "add it to cluster.slurm.container.mounts, or correct --trial-dir"
        return ConfigError("--trial-dir", str(paths.root), f"{socket.gethostname()} does not see the folder: {remedy}")
    return WaitTimeout(problem)


def _is_valid(path: Path, address: orders.Address, deadline: float) -> bool:
    """Return True if ``address`` is still the coordinator's, and the wait for it is not over."""
    return CoordinatorLease.now() < deadline and orders.read_address(path) == address

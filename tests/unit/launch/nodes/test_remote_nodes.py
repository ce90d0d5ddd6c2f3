"""Agents in this process: joins that are refused, spares, addresses of nodes in orders."""

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, replace

import psutil
import pytest

from realsys.cluster.stream.security import CurveKeys, ensure_keys
from realsys.config.device_plan import Needs
from realsys.config.machine import VISIBLE, NodeDevices, smallest_gpu
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, Fenced, RealsysError, RemoteError, WaitTimeout
from realsys.launch.nodes import coordinator, orders
from realsys.launch.nodes.coordinator import Binding, Terms, open_nodes
from realsys.launch.nodes.node_agent import AgentEndpoint, CoordinatorLease, NodeSignals, serve
from realsys.launch.nodes.orders import Exit, NodeListener, NodePort, ProcessOrder
from tests.support.processes.agents import NAME, FakeAgent, FakeCoordinator

NO_NEEDS = Needs(1, 0, 0)
TERMS = Terms("127.0.0.1", lease_s=60.0, join_s=60.0)
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@contextlib.asynccontextmanager
async def nodes_with_agents(folder, needs, agents, terms=TERMS):
    """Open the nodes; the agents join one after the other, and all must end with code 0."""
    paths = TrialPaths(folder)
    async with open_nodes(needs, paths, terms) as nodes:
        serving = [asyncio.create_task(serve(paths, name, 60.0, NodeSignals())) for name in agents]
        yield nodes
    assert await asyncio.gather(*serving) == [0] * len(agents)


async def environment_of(node, order):
    """Run a process that shows its environment."""
    ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    node.start(order, ended.set_result)
    assert (await ended).returncode == 0
    shown: dict[str, str] = json.loads(order.log.read_text())
    return shown


LOOPBACK = replace(TERMS, agents=("127.0.0.1", "", 2))
ENDED = replace(TERMS, problem=lambda: "srun ended with code 1: invalid partition")


@pytest.mark.parametrize(
    ("needs", "agents", "terms", "error", "problem"),
    [
        (Needs(1, 8, 0), ["hosta"], TERMS, ConfigError, "hosta cannot be node0: .* need 8 GPUs, 0 are there"),
        (NO_NEEDS, ["hosta"], LOOPBACK, ConfigError, "hosta: .*cluster.interface='': other hosts cannot reach 127"),
        (NO_NEEDS, [], ENDED, RealsysError, "^srun ended with code 1: invalid partition$"),
    ],
    ids=["GPUs", "loopback", "launcher"],
)
def test_node_that_cannot_begin_is_named(tmp_path, needs, agents, terms, error, problem):
    """Before anything is started."""

    async def body():
        async with nodes_with_agents(tmp_path, {"node0": needs}, agents, terms) as nodes:
            with pytest.raises(error, match=problem):
                await nodes["node0"].ready(60.0)

    asyncio.run(body())


def test_machine_with_smaller_gpus_is_refused(tmp_path, monkeypatch):
    """The agent reports the smallest GPU that it may use."""
    listed = "0, GPU-a, 81559, 0\n1, GPU-b, 40960, 0\n"
    monkeypatch.setattr("realsys.config.machine._present_gpus", lambda: 2)
    monkeypatch.setattr("realsys.launch.nodes.node_agent.gpu_bytes", lambda gpus: smallest_gpu(listed, gpus))

    async def body(visible):
        monkeypatch.setenv(VISIBLE, visible)
        async with nodes_with_agents(tmp_path, {"node0": Needs(1, 1, 0, 79 << 30)}, ["hosta"]) as nodes:
            await nodes["node0"].ready(60.0)

    asyncio.run(body("0"))
    with pytest.raises(ConfigError, match=r"its GPUs have 40.0 GiB, and the plan is for cluster.gpu_memory_gb=79"):
        asyncio.run(body("0,1"))


@pytest.mark.processes
def test_order_has_addresses_of_other_nodes(tmp_path):
    """It waits until the machine of the other node has joined: its address is not known before."""

    async def body():
        both = {"node0": NO_NEEDS, "node1": NO_NEEDS}
        async with nodes_with_agents(tmp_path, both, ["node1"]) as nodes:
            await nodes["node1"].ready(60.0)
            at = {"REALSYS_NAME_STORE": NodePort("node0", 2379)}
            order = ProcessOrder((sys.executable, "-c", SHOW), {}, tmp_path / "log", 1 << 20, addresses=at)
            running = asyncio.create_task(environment_of(nodes["node1"], order))
            await asyncio.sleep(0)
            assert not (tmp_path / "log").exists()
            late = asyncio.create_task(serve(TrialPaths(tmp_path), "node0", 60.0, NodeSignals()))
            assert (await running)["REALSYS_NAME_STORE"] == "127.0.0.1:2379"
        assert await late == 0

    asyncio.run(body())


@pytest.mark.processes
def test_gpu_indexes_become_ids_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("realsys.config.machine._present_gpus", lambda: 8)
    monkeypatch.setenv(VISIBLE, "4,5,6,7")

    async def body():
        async with nodes_with_agents(tmp_path, {"node0": Needs(1, 4, 0)}, ["hosta"]) as nodes:
            await nodes["node0"].ready(60.0)
            order = ProcessOrder((sys.executable, "-c", SHOW), {}, tmp_path / "log", 1 << 20, gpus=(1, 3))
            assert (await environment_of(nodes["node0"], order))[VISIBLE] == "5,7"

    asyncio.run(body())


def test_signal_to_a_spare_stops_the_run(tmp_path, monkeypatch):
    async def body():
        paths, signals, first = TrialPaths(tmp_path), NodeSignals(), NodeSignals()
        asked, heard = asyncio.Event(), asyncio.Event()

        class Heard(CoordinatorLease):
            def renew(self, lease_s):
                super().renew(lease_s)
                if all(each.agent is not None and each.agent.joined for each in (signals, first)):
                    heard.set()

        monkeypatch.setattr("realsys.launch.nodes.node_agent.CoordinatorLease", Heard)
        async with open_nodes({"node0": NO_NEEDS}, paths, TERMS) as nodes:
            nodes["node0"].listener = NodeListener(stop=lambda number: asked.set())
            agents = [asyncio.create_task(serve(paths, "node0", 60.0, first))]
            agents.append(asyncio.create_task(serve(paths, "hostb", 60.0, signals)))
            async with asyncio.timeout(60.0):
                await heard.wait()
                signals.handle(15)
                await asked.wait()
        assert await asyncio.gather(*agents) == [0, 0]

    asyncio.run(body())


def test_command_runs_with_the_python_of_the_agent(monkeypatch):
    """The agent may be in a container, whose Python has another path."""
    sent = orders.without_python([sys.executable, "-m", "x"])
    monkeypatch.setattr(sys, "executable", "/image/python")
    assert orders.with_python(sent) == ["/image/python", "-m", "x"]
    assert orders.with_python(["etcd", "--x"]) == ["etcd", "--x"]


# ---- Which machine gets which node: joins, losses, spares, machines that do not suit. Pure


_GIB = 1 << 30


@dataclass
class Process:
    gpus: tuple[int, ...] = ()
    memory: int = _GIB


LARGE = Needs.of([Process((0, 1)), Process((7,)), Process()], gpu_memory=79 * _GIB)
SMALL = Needs.of([Process()], gpu_memory=79 * _GIB)


def machine(name, gpus=8, cpus=16, memory=64 * _GIB, gpu_memory=80 * _GIB):
    return NodeDevices(name, cpus, memory, gpus, gpu_memory=gpu_memory)


def two_nodes():
    return Binding({"node0": LARGE, "node1": LARGE})


def test_needs_are_the_sum_of_the_processes():
    assert Needs(processes=3, gpus=8, memory=3 * _GIB, gpu_memory=79 * _GIB) == LARGE
    assert Needs(1, 0, _GIB) == SMALL


def test_machines_get_the_nodes_in_their_order():
    binding = two_nodes()
    assert [binding.join(machine(name)) for name in ("c", "a", "b")] == ["node0", "node1", ""]
    assert not binding.free and binding.node_of("a") == "node1" and list(binding.spares) == ["b"]


def test_machine_of_the_launcher_gets_the_first_node():
    """Also if it joins last; once it is lost, another machine may have its node."""
    binding = Binding({"node0": LARGE, "node1": LARGE}, first="c")
    assert [binding.join(machine(name)) for name in ("a", "b", "c")] == ["node1", "", "node0"]
    assert binding.leave("c") == ("node0", "b")


def test_spare_takes_the_node_of_a_lost_machine():
    binding = two_nodes()
    for name in ("a", "b", "c", "d"):
        binding.join(machine(name))
    assert binding.leave("a") == ("node0", "c")
    assert binding.machine_of == {"node0": "c", "node1": "b"} and list(binding.spares) == ["d"]
    assert binding.leave("d") == ("", "")
    assert binding.leave("b") == ("node1", "") and binding.free == ["node1"]


def test_machine_with_gpus_leaves_light_nodes_free():
    binding = Binding({"node0": SMALL, "node1": LARGE})
    assert [binding.join(machine("g", gpus=8)), binding.join(machine("c", gpus=0))] == ["node1", "node0"]


def test_lost_machine_gets_its_node_again():
    binding = two_nodes()
    for name in ("a", "b"):
        binding.join(machine(name))
    binding.leave("a")
    binding.leave("b")
    assert binding.join(machine("b")) == "node1"
    assert binding.join(machine("a")) == "node0"


def test_machine_with_the_name_of_a_node_gets_that_node():
    binding = two_nodes()
    assert binding.join(machine("node1")) == "node1"
    assert binding.join(machine("a")) == "node0"


def test_machine_gets_a_node_that_it_fits():
    binding = Binding({"node0": LARGE, "node1": SMALL})
    assert binding.join(machine("cpu", gpus=0)) == "node1"
    assert binding.join(machine("cpu2", gpus=0)) == ""
    assert binding.join(machine("gpu")) == "node0"
    assert binding.leave("gpu") == ("node0", "")


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"gpus": 4}, "its processes need 8 GPUs, 4 are there"),
        ({"memory": 2 * _GIB}, "its processes need about 3.0 GiB, 2.0 GiB are free"),
        ({"gpu_memory": 40 * _GIB}, "its GPUs have 40.0 GiB, and the plan is for cluster.gpu_memory_gb=79"),
    ],
)
def test_misfit_is_named_with_the_numbers(sizes, problem):
    binding = two_nodes()
    binding.join(machine("a"))
    assert not binding.misfit(machine("b"))
    assert binding.misfit(machine("b", **sizes)) == f"b cannot be node1: {problem}"
    assert binding.misfit(machine("node0", **sizes)) == f"node0 cannot be node0: {problem}"


def test_gpu_must_hold_a_training_rank():
    needs = replace(Needs.of([Process((0,))]), rank_gpu=52 * _GIB)
    assert not needs.problem(machine("a", gpu_memory=52 * _GIB))
    problem = "its GPUs have 40.0 GiB, and a training rank needs one of at least 52.0 GiB"
    assert needs.problem(machine("a", gpu_memory=40 * _GIB)) == problem


def test_gpu_with_its_nominal_memory_is_enough():
    needs = Needs.of([Process((0,))], gpu_memory=80 * _GIB)
    assert not needs.problem(machine("a", gpu_memory=81559 << 20))
    assert needs.problem(machine("a", gpu_memory=76 * _GIB))


def test_unknown_gpu_memory_refuses_no_machine():
    """A part of a GPU (MIG), or a machine without nvidia-smi."""
    assert not two_nodes().misfit(machine("a", gpu_memory=0))


# ---- The agent's lease on a clock of the test, the coordinator's file, and the keys of the socket


@pytest.fixture
def now(monkeypatch):
    """The time in its only element."""
    clock = [1000.0]
    monkeypatch.setattr(CoordinatorLease, "now", staticmethod(lambda: clock[0]))
    return clock


def test_lease_counts_from_the_last_pong_that_arrived(now):
    """A Ping proves the Pong before it only: the coordinator may never get the next one (`agent-ends-first`)."""
    lease = CoordinatorLease()
    lease.renew(10.0)
    now[0] = 1004.0
    lease.renew(10.0)
    assert lease.left_s == 6.0
    now[0] = 1009.0
    lease.renew(10.0)
    assert lease.left_s == 5.0


def test_lapsed_lease_fences_the_stream(now):
    lease = CoordinatorLease()
    lease.check()
    lease.renew(10.0)
    now[0] = 1010.5
    with pytest.raises(Fenced, match="the coordinator was not heard for 10 s"):
        lease.check()


def test_lease_is_quiet_when_two_pings_are_missing(now):
    lease = CoordinatorLease()
    assert lease.quiet
    lease.renew(10.0)
    now[0] = 1003.9
    assert not lease.quiet
    now[0] = 1004.1
    assert lease.quiet


def test_malformed_coordinator_file_is_refused(tmp_path):
    path = tmp_path / "coordinator.json"
    assert orders.read_address(path) is None
    address = orders.Address("tcp://127.0.0.1:1", "x", 20.0)
    orders.write_address(path, address)
    assert orders.read_address(path) == address and [file.name for file in tmp_path.iterdir()] == [path.name]
    path.write_text('{"address": 1}')
    with pytest.raises(RealsysError, match="must be written by the launcher of this realsys"):
        orders.read_address(path)


def test_launcher_outlives_agents_of_a_killed_one(tmp_path, monkeypatch):
    """It would read the trial's files while processes on other nodes still write them."""
    monkeypatch.setattr(orders, "KILL_MARGIN_S", 0.5)
    path, said = tmp_path / "coordinator.json", list[str]()
    orders.outlive_agents(path, said.append)
    assert not said
    orders.write_address(path, orders.Address("tcp://127.0.0.1:1", "x", 0.25))
    began = time.monotonic()
    orders.outlive_agents(path, said.append)
    assert time.monotonic() - began >= 0.75 and not path.exists()
    assert said == ["the last launcher left agents behind: waiting 0.75 s, until their processes have ended"]


@pytest.mark.parametrize(
    ("answer", "stays"),
    [(orders.AllEnded([]), False), (orders.Done(), True), (None, True)],
    ids=["ended", "bad", "none"],
)
def test_file_stays_if_an_agent_does_not_end(tmp_path, monkeypatch, answer, stays):
    """The next launcher must wait for its processes as for those of a launcher that was killed."""
    monkeypatch.setattr(orders, "KILL_MARGIN_S", 0.1)
    monkeypatch.setattr(coordinator, "_END_S", 0.1 if answer is None else 30.0)
    paths = TrialPaths(tmp_path)

    async def body():
        async with open_nodes({"a": Needs(1, 0, 0)}, paths, Terms("127.0.0.1", 60.0, 60.0)) as nodes:
            agent = FakeAgent(paths)
            await agent.answer("Ping", agent.pong)
            await nodes["a"].ready(60.0)
            answering = asyncio.create_task(agent.answer("EndRun", answer)) if answer else None
        if answering is not None:
            await answering
        await asyncio.to_thread(agent.endpoint.close, 0.0)

    asyncio.run(body())
    assert paths.coordinator.exists() is stays


def test_agent_with_other_keys_cannot_join(tmp_path):
    """Also on loopback, where the other streams have no keys: orders are programs to start."""
    paths = TrialPaths(tmp_path)

    async def body():
        async with open_nodes({"a": Needs.of([])}, paths, Terms("127.0.0.1", 60.0, 60.0)) as nodes:
            address = orders.read_address(paths.coordinator)
            server = ensure_keys(paths.keys).server_public
            own = CurveKeys.generate()
            stranger = CurveKeys(server, own.server_secret, own.client_public, own.client_secret)
            for keys in (stranger, None):
                endpoint = AgentEndpoint(0, address.address, keys=keys)
                with pytest.raises(WaitTimeout):
                    await asyncio.to_thread(endpoint.wait_connected, 0.5)
                await asyncio.to_thread(endpoint.close, 0.0)
            with pytest.raises(WaitTimeout, match="no agent for node a joined within 0 s"):
                await nodes["a"].ready(0.0)
        assert not paths.coordinator.exists()

    asyncio.run(body())


def test_local_node_needs_no_socket(tmp_path):
    async def body():
        async with open_nodes(
            {"this machine": Needs.of([])}, TrialPaths(tmp_path), Terms("127.0.0.1", 60.0, 60.0)
        ) as nodes:
            await nodes["this machine"].ready(0.0)

    asyncio.run(body())
    assert not list(tmp_path.iterdir())


# ---- An order, an answer or a notice that cannot be read costs its node, not the run


LEASE_S, MARGIN_S = 2.0, 0.25
NONSENSE = orders.Done()  # decodes as no other message


@pytest.mark.parametrize("what", ["pong", "started", "notice"])
def test_unreadable_agent_is_lost_after_its_lease(tmp_path, monkeypatch, what):
    """It does not know that it was given up: until its lease is over its processes live (`agent-ends-first`)."""
    monkeypatch.setattr(orders, "KILL_MARGIN_S", MARGIN_S)

    async def body():
        paths, ended = TrialPaths(tmp_path), asyncio.get_running_loop().create_future()
        async with open_nodes({"a": Needs(1, 0, 0)}, paths, Terms("127.0.0.1", LEASE_S, 60.0)) as nodes:
            agent = FakeAgent(paths)
            await agent.answer("Ping", agent.pong)
            await nodes["a"].ready(60.0)
            nodes["a"].start(ProcessOrder((sys.executable,), {}, tmp_path / "log", 1 << 20), ended.set_result)
            await agent.answer("Start", NONSENSE if what == "started" else orders.Started(1))
            if what == "notice":
                agent.endpoint.notify("Exited", NONSENSE)
            elif what == "pong":
                await agent.answer("Ping", NONSENSE)
            lost: Exit = await asyncio.wait_for(ended, 60.0)
            assert time.time() >= lost.time + LEASE_S + MARGIN_S
            await asyncio.to_thread(agent.endpoint.close, 0.0)
            return lost

    lost = asyncio.run(body())
    assert lost.lost.startswith("was lost with its node a (hosta): a message of its agent cannot be read: ")


@pytest.mark.processes
def test_agent_joins_again_after_an_unreadable_order(tmp_path):
    """Without its process, whose end it does not report: the process is lost with the node."""

    async def body():
        paths = TrialPaths(tmp_path)
        coordinator = FakeCoordinator(paths)
        agent = asyncio.create_task(serve(paths, NAME, 60.0, NodeSignals()))
        async with asyncio.timeout(60.0):
            first = await coordinator.joined.get()
            await coordinator.order("Ping", orders.Ping(60.0), orders.Pong)
            argv = [sys.executable, "-c", "import signal; signal.pause()"]
            start = orders.Start(first.incarnation, 1, argv, {}, str(tmp_path / "log"), 1 << 20, False, [])
            started = await coordinator.order("Start", start, orders.Started)
            assert isinstance(started, orders.Started) and psutil.pid_exists(started.pid)
            pending = asyncio.create_task(coordinator.order("SendSignal", NONSENSE, orders.Done))
            again = await coordinator.joined.get()
            assert again.name == first.name and again.incarnation > first.incarnation
            await asyncio.gather(pending, return_exceptions=True)
            assert not psutil.pid_exists(started.pid) and not coordinator.exits
            await coordinator.order("Ping", orders.Ping(60.0), orders.Pong)
            await coordinator.order("EndRun", orders.EndRun(1.0), orders.AllEnded)
            code = await agent
        coordinator.stream.close()
        return code

    assert asyncio.run(body()) == 0


def test_unreadable_first_order_ends_the_run(tmp_path):
    """A coordinator of another realsys: to join again would not help."""

    async def body():
        paths = TrialPaths(tmp_path)
        coordinator = FakeCoordinator(paths)
        agent = asyncio.create_task(serve(paths, NAME, 60.0, NodeSignals()))
        async with asyncio.timeout(60.0):
            await coordinator.joined.get()
            with pytest.raises(RemoteError, match="Ping: DecodeError: .*not a Ping"):
                await coordinator.order("Ping", NONSENSE, orders.Pong)
            await coordinator.order("EndRun", orders.EndRun(1.0), orders.AllEnded)
            code = await agent
        coordinator.stream.close()
        return code

    assert asyncio.run(body()) == 0

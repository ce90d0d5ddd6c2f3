"""Agents in this process: joins that are refused, spares, addresses of nodes in orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from realsys.config.device_plan import Needs
from realsys.config.machine import VISIBLE, smallest_gpu
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RealsysError
from realsys.launch.nodes import orders
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.nodes.node_agent import CoordinatorLease, NodeSignals, serve
from realsys.launch.nodes.orders import Exit, NodeListener, NodePort, ProcessOrder, SupervisedNode

NO_NEEDS = Needs(1, 0, 0)
TERMS = Terms("127.0.0.1", lease_s=60.0, join_s=60.0)
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@contextlib.asynccontextmanager
async def nodes_with_agents(
    folder: Path, needs: dict[str, Needs], agents: Sequence[str], terms: Terms = TERMS
) -> AsyncIterator[dict[str, SupervisedNode]]:
    """Open the nodes; the agents join one after the other, and all must end with code 0."""
    paths = TrialPaths(folder)
    async with open_nodes(needs, paths, terms) as nodes:
        serving = [asyncio.create_task(serve(paths, name, 60.0, NodeSignals())) for name in agents]
        yield nodes
    assert await asyncio.gather(*serving) == [0] * len(agents)


async def environment_of(node: SupervisedNode, order: ProcessOrder) -> dict[str, str]:
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
def test_node_that_cannot_begin_is_named(
    tmp_path: Path, needs: Needs, agents: list[str], terms: Terms, error: type[RealsysError], problem: str
) -> None:
    """Before anything is started."""

    async def body() -> None:
        async with nodes_with_agents(tmp_path, {"node0": needs}, agents, terms) as nodes:
            with pytest.raises(error, match=problem):
                await nodes["node0"].ready(60.0)

    asyncio.run(body())


def test_machine_with_smaller_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reports the smallest GPU that it may use."""
    listed = "0, GPU-a, 81559, 0\n1, GPU-b, 40960, 0\n"
    monkeypatch.setattr("realsys.config.machine._present_gpus", lambda: 2)
    monkeypatch.setattr("realsys.launch.nodes.node_agent.gpu_bytes", lambda gpus: smallest_gpu(listed, gpus))

    async def body(visible: str) -> None:
        monkeypatch.setenv(VISIBLE, visible)
        async with nodes_with_agents(tmp_path, {"node0": Needs(1, 1, 0, 79 << 30)}, ["hosta"]) as nodes:
            await nodes["node0"].ready(60.0)

    asyncio.run(body("0"))
    with pytest.raises(ConfigError, match=r"its GPUs have 40.0 GiB, and the plan is for cluster.gpu_memory_gb=79"):
        asyncio.run(body("0,1"))


@pytest.mark.processes
def test_order_has_addresses_of_other_nodes(tmp_path: Path) -> None:
    """It waits until the machine of the other node has joined: its address is not known before."""

    async def body() -> None:
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
def test_gpu_indexes_become_ids_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realsys.config.machine._present_gpus", lambda: 8)
    monkeypatch.setenv(VISIBLE, "4,5,6,7")

    async def body() -> None:
        async with nodes_with_agents(tmp_path, {"node0": Needs(1, 4, 0)}, ["hosta"]) as nodes:
            await nodes["node0"].ready(60.0)
            order = ProcessOrder((sys.executable, "-c", SHOW), {}, tmp_path / "log", 1 << 20, gpus=(1, 3))
            assert (await environment_of(nodes["node0"], order))[VISIBLE] == "5,7"

    asyncio.run(body())


def test_signal_to_a_spare_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        paths, signals, first = TrialPaths(tmp_path), NodeSignals(), NodeSignals()
        asked, heard = asyncio.Event(), asyncio.Event()

        class Heard(CoordinatorLease):
            def renew(self, lease_s: float) -> None:
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


def test_command_runs_with_the_python_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent may be in a container, whose Python has another path."""
    sent = orders.without_python([sys.executable, "-m", "x"])
    monkeypatch.setattr(sys, "executable", "/image/python")
    assert orders.with_python(sent) == ["/image/python", "-m", "x"]
    assert orders.with_python(["etcd", "--x"]) == ["etcd", "--x"]

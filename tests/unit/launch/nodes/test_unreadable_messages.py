"""An order, an answer or a notice that cannot be read costs its node, not the run."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import psutil
import pytest

from realsys.config.device_plan import Needs
from realsys.config.paths import TrialPaths
from realsys.errors import RemoteError
from realsys.launch.nodes import orders
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.nodes.node_agent import NodeSignals, serve
from realsys.launch.nodes.orders import Exit, ProcessOrder
from tests.support.processes.agents import NAME, FakeAgent, FakeCoordinator

LEASE_S, MARGIN_S = 2.0, 0.25
NONSENSE = orders.Done()  # decodes as no other message


@pytest.mark.parametrize("what", ["pong", "started", "notice"])
def test_unreadable_agent_is_lost_after_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """It does not know that it was given up: until its lease is over its processes live (`agent-ends-first`)."""
    monkeypatch.setattr(orders, "KILL_MARGIN_S", MARGIN_S)

    async def body() -> Exit:
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
def test_agent_joins_again_after_an_unreadable_order(tmp_path: Path) -> None:
    """Without its process, whose end it does not report: the process is lost with the node."""

    async def body() -> int:
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


def test_unreadable_first_order_ends_the_run(tmp_path: Path) -> None:
    """A coordinator of another realsys: to join again would not help."""

    async def body() -> int:
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

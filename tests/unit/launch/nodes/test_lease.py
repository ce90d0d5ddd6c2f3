"""The agent's lease on a clock of the test, the coordinator's file, and the keys of the socket."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from realsys.cluster.stream.security import CurveKeys, ensure_keys
from realsys.config.device_plan import Needs
from realsys.config.paths import TrialPaths
from realsys.errors import Fenced, RealsysError, WaitTimeout
from realsys.launch.nodes import coordinator, orders
from realsys.launch.nodes.coordinator import Terms, open_nodes
from realsys.launch.nodes.node_agent import AgentEndpoint, CoordinatorLease
from tests.support.processes.agents import FakeAgent


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its only element."""
    clock = [1000.0]
    monkeypatch.setattr(CoordinatorLease, "now", staticmethod(lambda: clock[0]))
    return clock


def test_lease_counts_from_the_last_pong_that_arrived(now: list[float]) -> None:
    """A Ping proves the Pong before it only: the coordinator may never get the next one (`agent-ends-first`)."""
    lease = CoordinatorLease()
    lease.renew(10.0)
    now[0] = 1004.0
    lease.renew(10.0)
    assert lease.left_s == 6.0
    now[0] = 1009.0
    lease.renew(10.0)
    assert lease.left_s == 5.0


def test_lapsed_lease_fences_the_stream(now: list[float]) -> None:
    lease = CoordinatorLease()
    lease.check()
    lease.renew(10.0)
    now[0] = 1010.5
    with pytest.raises(Fenced, match="the coordinator was not heard for 10 s"):
        lease.check()


def test_lease_is_quiet_when_two_pings_are_missing(now: list[float]) -> None:
    lease = CoordinatorLease()
    assert lease.quiet
    lease.renew(10.0)
    now[0] = 1003.9
    assert not lease.quiet
    now[0] = 1004.1
    assert lease.quiet


def test_malformed_coordinator_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.json"
    assert orders.read_address(path) is None
    address = orders.Address("tcp://127.0.0.1:1", "x", 20.0)
    orders.write_address(path, address)
    assert orders.read_address(path) == address and [file.name for file in tmp_path.iterdir()] == [path.name]
    path.write_text('{"address": 1}')
    with pytest.raises(RealsysError, match="must be written by the launcher of this realsys"):
        orders.read_address(path)


def test_launcher_outlives_agents_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_file_stays_if_an_agent_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: msgspec.Struct | None, stays: bool
) -> None:
    """The next launcher must wait for its processes as for those of a launcher that was killed."""
    monkeypatch.setattr(orders, "KILL_MARGIN_S", 0.1)
    monkeypatch.setattr(coordinator, "_END_S", 0.1 if answer is None else 30.0)
    paths = TrialPaths(tmp_path)

    async def body() -> None:
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


def test_agent_with_other_keys_cannot_join(tmp_path: Path) -> None:
    """Also on loopback, where the other streams have no keys: orders are programs to start."""
    paths = TrialPaths(tmp_path)

    async def body() -> None:
        async with open_nodes({"a": Needs.of([])}, paths, Terms("127.0.0.1", 60.0, 60.0)) as nodes:
            address = orders.read_address(paths.coordinator)
            assert address is not None
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


def test_local_node_needs_no_socket(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_nodes(
            {"this machine": Needs.of([])}, TrialPaths(tmp_path), Terms("127.0.0.1", 60.0, 60.0)
        ) as nodes:
            await nodes["this machine"].ready(0.0)

    asyncio.run(body())
    assert not list(tmp_path.iterdir())

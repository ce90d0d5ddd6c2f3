"""The wait of the supervisor for the machines of a run."""

from __future__ import annotations

import asyncio

from realsys.errors import ConfigError, WaitTimeout
from realsys.launch.nodes.orders import OnExit, Process, ProcessOrder, SupervisedNode
from realsys.launch.supervise.restart_policy import TrialOutcome
from realsys.launch.supervise.supervisor import Bounds, Hooks, Supervisor


class Machine(SupervisedNode):
    """A node whose wait ends with ``error``."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    async def ready(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error

    def start(self, order: ProcessOrder, on_exit: OnExit) -> Process:
        raise AssertionError("nothing may be started before all machines are there")

    async def end(self, timeout_s: float) -> list[str]:
        return []


def start(**errors: Exception | None) -> TrialOutcome:
    """Return the end of a run on one node for each name."""
    nodes = {name: Machine(error) for name, error in errors.items()}

    async def body() -> TrialOutcome:
        return await Supervisor([], Bounds(1.0, 1.0, 2, join_s=20.0), Hooks(say=lambda *_: None), nodes).run()

    return asyncio.run(body())


LATE = WaitTimeout("late")


def test_missing_nodes_are_listed() -> None:
    """Another start may have better machines: a job is queued again."""
    outcome = start(node0=None, node1=LATE, node2=None, node3=LATE)
    assert outcome.status == "failed" and outcome.no_machine
    assert outcome.reason.startswith("the start: no agent for nodes node1, node3 joined within 20 s")


def test_start_without_any_machine_is_final() -> None:
    """It would fail again: the agents cannot be started, or cannot see the folder."""
    outcome = start(node0=LATE, node1=LATE)
    assert outcome.status == "failed" and not outcome.no_machine
    assert "no agent for nodes node0, node1 joined" in outcome.reason


def test_refused_machine_counts_more_than_a_late_one() -> None:
    outcome = start(node0=LATE, node1=ConfigError("cluster.nodes", 2, "8 GPUs are needed"), node2=None)
    assert isinstance(outcome.refused, ConfigError) and not outcome.no_machine

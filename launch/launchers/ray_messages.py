"""Messages between the Ray launcher and its driver, one JSON object per line."""

from __future__ import annotations

import msgspec

from realsys.launch.launchers.ray_bundles import RayNode


class Task(msgspec.Struct, frozen=True):
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
    namespace: str
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


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the driver.

    say       line for the user
    problem   why the trial cannot get its agents any more
    nodes     live nodes of the cluster
    """

    say: str = ""
    problem: str = ""
    nodes: list[RayNode] = []

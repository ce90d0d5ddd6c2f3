"""The fork servers of this process: workers start in milliseconds, because their modules are imported once.

A command that starts workers calls ``start`` first of all: a fork is safe while there is one thread. One server has the
modules of the processes that use no torch, so that these stay small; the other one has torch and Megatron-Core.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence

from realsys.cluster.children.fork_server import ForkServer

CONTROL = (
    "realsys.cluster.lease",
    "realsys.cluster.names.connect",
    "realsys.cluster.names.etcd_store",
    "realsys.workers.name_store",
    "realsys.workers.gserver_manager",
    "realsys.workers.rollout_worker",
    "realsys.workers.reward_service",
    "realsys.workers.master_worker",
    "realsys.workers.replay_master",
    "realsys.workers.evaluator",
)
COMPUTE = (
    "realsys.cluster.lease",
    "realsys.cluster.names.connect",
    "realsys.cluster.names.etcd_store",
    "realsys.workers.model_worker",
    "realsys.workers.generation_server",
    "realsys.workers.generation_part",
    "torch",
    "torch._dynamo",  # torch's optimizers import it in their first step
    "realsys.generation.embedded.engine",
    "realsys.generation.server",
    "realsys.cluster.stream.push_pull",
    "realsys.train.worker.call_service",
    "realsys.train.megatron.mesh",
    "realsys.train.megatron.rendezvous",
    "realsys.weights.disk.transport",
    "realsys.weights.disk.writer",
    "realsys.generation.weight_folder",
    "realsys.weights.host_reader",
)
_servers: list[ForkServer] = []


def start() -> None:
    """Fork the servers, unless this process has them already or has several threads."""
    if not _servers and len(os.listdir("/proc/self/task")) == 1:
        _servers.extend((ForkServer.fork(COMPUTE), ForkServer.fork(CONTROL)))
        atexit.register(close)


def close() -> None:
    """End the servers."""
    while _servers:
        _servers.pop().close()


def wait(timeout_s: float) -> None:
    """Wait for at most ``timeout_s`` until the servers have imported their modules."""
    deadline = time.monotonic() + timeout_s
    for server in _servers:
        server.ready(max(0.0, deadline - time.monotonic()))


def is_importing() -> bool:
    """Return True while a server makes its imports."""
    return any(server.is_starting for server in _servers)


def server_of(argv: Sequence[str]) -> ForkServer | None:
    """Return the server that is ready to fork this program."""
    return next((server for server in _servers if server.runs(argv)), None)

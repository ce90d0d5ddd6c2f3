"""A real Ray cluster on this machine: a head without CPUs, and nodes that a test can kill.

Ray's own module starts it (``ray.cluster_utils``). It runs in a child process, because Ray leaves threads behind.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

CPUS, GPUS = 4, 2  # numbers that each node claims to have
OBJECT_STORE_BYTES = 80 << 20
STOP_S = 30.0


class RayCluster:
    """A running cluster. ``address``: of its head."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._read()

    def kill_node(self, node_id: str) -> None:
        """SIGKILL all processes of the node whose id begins with ``node_id``, as when its machine dies."""
        assert self._process.stdin is not None
        self._process.stdin.write(node_id + "\n")
        self._process.stdin.flush()
        assert self._read() == "killed"

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that holds the Ray cluster has ended: see its output"
        return json.loads(line)


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """Run a cluster with a head and ``nodes`` further nodes. No process of it is left after the block."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path: Ray has sockets in it
    (Path(folder) / "ray").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(nodes), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ray writes the address of the newest cluster to {RAY_TMPDIR}/ray, and does not make that folder.
        env={**os.environ, "RAY_raylet_start_wait_time_s": "120", "RAY_TMPDIR": folder},
        text=True,
        start_new_session=True,
    )
    try:
        yield RayCluster(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        finally:
            process.stdout.close()
            _kill_session(process.pid)  # all of Ray, also when it did not start
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _kill_session(leader: int) -> None:
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def main(count: int, folder: str) -> None:
    """Hold a cluster until the end of the input; each line of it is the id of a node to kill."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    # A dead node is noticed within 3 s instead of 15 s.
    settings = {"health_check_period_ms": 500, "health_check_timeout_ms": 3000}
    common = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **common,
            "num_cpus": 0,
            "temp_dir": folder,
            "include_dashboard": False,
            "_system_config": settings,
        },
    )
    nodes = [cluster.add_node(num_cpus=CPUS, num_gpus=GPUS, **common) for _ in range(count)]
    print(json.dumps(cluster.address), file=answers)
    for line in sys.stdin:
        [node] = [node for node in nodes if node.node_id.startswith(line.strip())]
        cluster.remove_node(node, allow_graceful=False)
        print(json.dumps("killed"), file=answers)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

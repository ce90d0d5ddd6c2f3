"""The Ray launcher on a real Ray cluster of three nodes on this machine, with programs in place of agents."""

import asyncio
import sys
import time

import psutil
import pytest

from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.launchers.ray_launcher import RayLauncher
from tests.support.jobs.jobs import processes_of
from tests.support.processes.ray_cluster import ray_cluster

pytestmark = pytest.mark.needs(package="ray")

BOUND_S = 60.0
#: in place of `realsys node-agent`: shows its GPUs, ends with its actor
AGENT = """
import os, signal, sys
from realsys.cluster.prctl import die_with_parent
if not die_with_parent(signal.SIGKILL, int(os.environ["REALSYS_PARENT_PID"])):
    sys.exit("the actor ended first")
print(sys.argv[-1], "may use GPUs", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as cluster:
        yield cluster


def settings(tmp_path, cluster, *overrides):
    return compose(
        [
            *("experiment=arith", "cluster=ray", f"cluster.ray.address={cluster.address}", "cluster.ray.timeout_s=5"),
            *("cluster.nodes=2", "cluster.cpus_per_node=3", "cluster.gpus_per_node=2", f"fileroot={tmp_path}"),
            *("trial=t", *overrides),
        ]
    )


class Started:
    """A launcher with its lines."""

    def __init__(self, config, program):
        self.lines: list[str] = []
        self.paths = TrialPaths.of(config)
        self.launcher = RayLauncher(config, self.paths)
        self._program = program
        self._new = asyncio.Event()

    async def __aenter__(self):
        await self.launcher.start([sys.executable, "-c", self._program, str(self.paths.root)], self._say)
        return self

    async def __aexit__(self, *_):
        await self.launcher.stop()

    def _say(self, line):
        self.lines.append(line)
        self._new.set()

    async def until(self, count, text):
        """Wait for ``count`` lines with ``text``; return what follows it."""
        async with asyncio.timeout(BOUND_S):
            while len(found := [line.partition(text)[2] for line in self.lines if text in line]) < count:
                assert not self.launcher.problem() or text in self.launcher.problem(), self.lines
                self._new.clear()
                await self._new.wait()
        return found


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("cluster.nodes=4", "4 nodes with CPU 3, GPU 2 each are needed, 3 of 4 have that"),
        ("cluster.gpus_per_node=8", "2 nodes with CPU 3, GPU 8 each are needed, 0 of 4 have that"),
    ],
)
def test_cluster_too_small_is_refused(tmp_path, cluster, override, text):
    with pytest.raises(ConfigError, match=text):
        RayLauncher.check(settings(tmp_path, cluster, override))


def test_client_address_is_refused(tmp_path, cluster):
    with pytest.raises(ConfigError, match="start the run on a node of the cluster"):
        RayLauncher.check(settings(tmp_path, cluster, "cluster.ray.address=ray://head:10001"))


def test_agent_that_fails_is_a_problem(tmp_path, cluster):
    """A program that exits with an error would do so on every node, so it is not started again."""

    async def body():
        async with Started(settings(tmp_path, cluster), "raise SystemExit(3)") as trial:
            await trial.until(2, "exited with code 3: see ")
            assert trial.launcher.problem().endswith(".log")

    asyncio.run(body())


def test_killed_actor_takes_its_agent_with_it(tmp_path, cluster):
    """The next agent on the node starts when the processes of the first one have ended for sure."""

    async def body():
        short = ("cluster.heartbeat_s=0.5", "cluster.lease_s=1")
        async with Started(settings(tmp_path, cluster, *short), AGENT) as trial:
            names = await trial.until(2, "Ray started the agent of ")
            agent = psutil.Process(int(processes_of(trial.paths.root)[0].split()[0]))
            killed = time.monotonic()
            agent.parent().kill()
            await asyncio.to_thread(agent.wait, BOUND_S)
            [*_, third] = await trial.until(3, "Ray started the agent of ")
            assert third in names and time.monotonic() - killed > 1.0

    asyncio.run(body())


def test_dead_node_is_replaced_or_missed(tmp_path, cluster):
    """The last test of the cluster: it kills two of its nodes, and the second one has no replacement."""

    async def body():
        async with Started(settings(tmp_path, cluster), AGENT) as trial:
            first, second = await trial.until(2, "Ray started the agent of ")
            cluster.kill_node(first.rpartition("-")[2])
            [*_, third] = await trial.until(3, "Ray started the agent of ")
            assert third not in (first, second)
            cluster.kill_node(third.rpartition("-")[2])
            [*_, problem] = await trial.until(1, "Ray placed no agent within 5 s (cluster.ray.timeout_s): ")
            assert problem.startswith("1 node with CPU 3, GPU 2 is needed, 0 of 1 have that free")
            assert len(processes_of(trial.paths.root)) == 1, "the agent of a dead node is alive"
        for name in (first, second, third):
            log = trial.paths.logs / f"node_agent-{name}.log"
            assert log.read_text() == f"{name} may use GPUs 0,1\n"
        assert not processes_of(trial.paths.root)
        assert f"the agent of {first} was lost: its Ray node died" in "\n".join(trial.lines)

    asyncio.run(body())

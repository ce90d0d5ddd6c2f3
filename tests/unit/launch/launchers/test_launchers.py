"""The door of launchers, the launcher ``local``, and what the launcher refuses before anything is written."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from realsys.config.compose import compose, given_fields
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, NameStoreConfig, RayConfig
from realsys.errors import ConfigError
from realsys.launch.fit import fit
from realsys.launch.launchers.contract import Launcher, check_launcher, make_launcher
from realsys.launch.launchers.ray_launcher import RayNode, agent_name, bundle_of, shortage
from realsys.launch.process_plan import agent_command
from realsys.launch.slurm.launcher import SlurmLauncher
from tests.support.polling import poll

HERE = Machine(cpus=4, memory_bytes=64 << 30)


class InAllocation(Launcher):
    """A launcher that knows its nodes."""

    @classmethod
    def settings(cls, config):
        reason = "the allocation has them"
        return {"cluster.nodes": (3, reason), "cluster.gpus_per_node": (8, reason)}

    async def start(self, agent, say):
        pass


class Refusing(InAllocation):
    @classmethod
    def check(cls, config):
        raise ConfigError("cluster.launcher", "Refusing", "there is no allocation")


class Unfinished(Launcher):
    pass


def config_of(name, **fields):
    return Config(cluster=ClusterConfig(launcher=f"{__name__}:{name}", **fields))


def test_launcher_sets_the_nodes_that_it_knows():
    config, lines = fit(config_of("InAllocation"), set(), HERE)
    assert (config.cluster.nodes, config.cluster.gpus_per_node) == (3, 8)
    assert lines[0] == "set cluster.nodes=3: the allocation has them"


def test_given_nodes_win_over_those_of_the_launcher():
    config, _ = fit(config_of("InAllocation", nodes=2), {"cluster.nodes"}, HERE)
    assert config.cluster.nodes == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Unfinished"), "is not a launcher: the class lacks start"),
        (config_of("Refusing"), "there is no allocation"),
        (Config(cluster=ClusterConfig(launcher="slrum")), "unknown launcher: use one of local"),
        (Config(cluster=ClusterConfig(launcher="ray", nodes=2, cpu_nodes=1)), "the nodes of a Ray trial are equal"),
        (Config(cluster=ClusterConfig(spare_nodes=1)), "there are no other machines: set cluster.nodes too"),
        (
            Config(cluster=ClusterConfig(nodes=1, spare_nodes=1, name_store=NameStoreConfig(backend="etcd"))),
            "other nodes cannot reach it: name etcd's address, or set cluster.name_store.start=true",
        ),
    ],
)
def test_wrong_launcher_is_one_line(config, message):
    with pytest.raises(ConfigError, match=message):
        check_launcher(config)


def test_local_launcher_shows_the_command_of_an_agent():
    config, paths, said = Config(cluster=ClusterConfig(nodes=2, spare_nodes=1)), TrialPaths(Path("/s/a b")), list[str]()
    launcher = make_launcher(config, paths)
    asyncio.run(launcher.start(agent_command(paths), said.append))
    assert launcher.machines == 3 and not launcher.problem()
    [line] = said
    assert line.startswith("start on 2 machines, and 1 more as spares: env PYTHONPATH=/")
    assert line.endswith(
        f"{sys.executable} -P -m realsys.launch.cli node-agent --trial-dir '/s/a b' --node $(hostname)"
    )


def test_cluster_group_leaves_its_fields_open(tmp_path):
    """A group with the name of a section is no section that the user has set."""
    (tmp_path / "cluster").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /name_store: etcd\ncluster:\n  name_store:\n    start: true\n"
    (tmp_path / "cluster" / "ours.yaml").write_text(text)
    overrides = ["experiment=arith", "cluster=ours", "cluster.host=10.0.0.1"]
    cluster = compose(overrides, config_dir=tmp_path).cluster
    assert (cluster.host, cluster.name_store.backend, cluster.name_store.start) == ("10.0.0.1", "etcd", True)
    given = {field for field in given_fields(overrides, config_dir=tmp_path) if field.startswith("cluster.")}
    assert given == {"cluster.launcher", "cluster.host", "cluster.name_store.start"}


def test_example_starts_agents_with_ssh(tmp_path, monkeypatch):
    """A script stands in for ssh: it shows what it was told, and ends with code 255."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\necho $1: $2 >> {tmp_path}/said\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOSTS", "hosta hostb hostc")
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "docs" / "examples")
    config = Config(cluster=ClusterConfig(launcher="launcher:Ssh", nodes=1, spare_nodes=1))
    check_launcher(config)
    launcher = make_launcher(config, TrialPaths(Path("/s/t")))

    async def body():
        await launcher.start(["agent"], print)
        await asyncio.gather(*(shell.wait() for shell in launcher.shells))  # stop would end them before they write
        await launcher.stop()
        return launcher.problem()

    assert asyncio.run(body()) == "ssh ended with code 255 on every host"
    assert sorted((tmp_path / "said").read_text().splitlines()) == [f"host{x}: agent --node host{x}" for x in "ab"]
    with pytest.raises(ConfigError, match="cluster.nodes=4: the variable HOSTS names 3"):
        check_launcher(Config(cluster=ClusterConfig(launcher="launcher:Ssh", nodes=4)))


# ---- Resources of a trial against those of a Ray cluster: what is needed, what is missing, in which words


GPU_NODE = {"CPU": 96.0, "GPU": 8.0, "memory": 512.0 * 2**30, "node:10.0.0.1": 1.0}


def nodes(*totals):
    return [RayNode(f"{index}f", f"host{index}", total) for index, total in enumerate(totals)]


def test_bundle_names_everything_that_a_node_needs():
    ray = RayConfig(resources={"h100": 1.0})
    cluster = ClusterConfig(nodes=2, gpus_per_node=8, cpus_per_node=64, memory_gb_per_node=256.0, ray=ray)
    assert bundle_of(cluster) == {"CPU": 64.0, "GPU": 8.0, "memory": 256 * 2**30, "h100": 1.0}


def test_bundle_without_sizes_is_one_core():
    assert bundle_of(ClusterConfig(nodes=2)) == {"CPU": 1.0}


def test_cluster_with_enough_nodes_lacks_nothing():
    assert shortage({"CPU": 64.0, "GPU": 8.0}, 2, nodes(GPU_NODE, {"CPU": 4.0}, GPU_NODE)) == ""


def test_shortage_has_numbers_of_short_nodes():
    cluster = nodes(GPU_NODE, {"CPU": 96.0, "GPU": 4.0, "memory": 2.0**30}, {"CPU": 4.0})
    assert shortage({"CPU": 64.0, "GPU": 8.0, "memory": 64 * 2**30}, 2, cluster) == (
        "2 nodes with CPU 64, GPU 8, memory 64 GiB each are needed, 1 of 3 have that "
        "(host1 has CPU 96, GPU 4, memory 1 GiB; host2 has CPU 4, GPU 0, memory 0 GiB)"
    )


def test_shortage_of_large_cluster_names_few():
    text = shortage({"GPU": 8.0}, 65, nodes(*[{"CPU": 1.0}] * 64))
    assert text.startswith("65 nodes with GPU 8 each are needed, 0 of 64 have that (host0 has GPU 0;")
    assert text.endswith("host3 has GPU 0; 60 more)")


def test_used_resources_count_only_when_asked():
    busy = [RayNode("0f", "host0", GPU_NODE, {"CPU": 96.0})]
    assert shortage({"GPU": 8.0}, 1, busy) == ""
    text = shortage({"GPU": 8.0}, 1, busy, free=True)
    assert text == "1 node with GPU 8 is needed, 0 of 1 have that free (host0 has GPU 0)"


def test_agents_on_one_host_get_different_names():
    assert agent_name("a", "0123456789", ["a", "b"]) == "a"
    assert agent_name("a", "0123456789", ["a", "b", "a"]) == "a-012345"


# ---- The launcher ``slurm`` with a stand-in for srun


#: the step of the agents ends at once, that of the guards lasts
SRUN = """#!/bin/sh
case "$*" in *job-name=agents*) echo refused; exit 3;; esac
echo $$ > {folder}/guards
exec sleep 300
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """It runs in job 7, which was queued again twice."""
    (tmp_path / "srun").write_text(SRUN.format(folder=tmp_path))
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "a").mkdir()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2"}
    for name, value in {**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    return SlurmLauncher(Config(cluster=ClusterConfig(nodes=2)), TrialPaths(tmp_path / "a"))


def test_run_ends_its_guards_and_earlier_ones(launcher, tmp_path):
    """A guard of an earlier run of the job ends when its file comes."""
    said: list[str] = []

    async def body():
        await launcher.start(["agent"], said.append)
        await asyncio.to_thread(poll, launcher.problem, "the end of the agents", 60.0)
        await asyncio.to_thread(poll, (tmp_path / "guards").exists, "the guards", 60.0)
        await launcher.stop()

    asyncio.run(body())
    assert said == ["job 7: agents on n1, n2"]
    assert launcher.problem() == "srun exited with code 3: refused"
    files = sorted(path.name for path in launcher.paths.job.parent.glob("no-coordinator-*"))
    assert files == ["no-coordinator-7-0", "no-coordinator-7-1"]
    assert not psutil.pid_exists(int((tmp_path / "guards").read_text()))


def test_spares_must_leave_a_node(launcher):
    one = Config(cluster=ClusterConfig(spare_nodes=1))
    assert launcher.settings(one)["cluster.nodes"] == (1, "job 7 has 2 nodes")
    all_of_them = Config(cluster=ClusterConfig(spare_nodes=2))
    with pytest.raises(ConfigError, match="cluster.spare_nodes=2: leave no node for the trial: job 7 has 2 nodes"):
        launcher.settings(all_of_them)


def test_address_of_the_environment_suits_one_node(monkeypatch):
    monkeypatch.setenv("REALSYS_HOST", "10.0.0.1")
    SlurmLauncher.check(Config(cluster=ClusterConfig(nodes=1)))
    with pytest.raises(ConfigError, match="REALSYS_HOST='10.0.0.1': is handed to all 2 nodes"):
        SlurmLauncher.check(Config(cluster=ClusterConfig(nodes=2)))

"""Settings of a job that SLURM, or the batch script, could not take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from realsys.config.compose import compose
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, ContainerConfig, SlurmConfig
from realsys.errors import ConfigError
from realsys.launch.slurm.launcher import check_network, check_slurm, seconds_of


def checked(slurm: SlurmConfig, nodes: int = 1) -> None:
    check_slurm(Config(cluster=ClusterConfig(nodes=nodes, slurm=slurm)))


def test_defaults_are_accepted() -> None:
    checked(SlurmConfig())


@pytest.mark.parametrize(
    ("slurm", "nodes", "text"),
    [
        (SlurmConfig(), 0, "cluster.nodes=0"),
        (SlurmConfig(partition="a b"), 1, "cluster.slurm.partition='a b': must be one word"),
        (SlurmConfig(setup=["a\nb"]), 1, "cluster.slurm.setup='a\\nb': must be one line"),
        (SlurmConfig(container=ContainerConfig(mounts=["a\nb"])), 1, "cluster.slurm.container.mounts"),
        (SlurmConfig(options=["mail=END"]), 1, "must begin with -"),
        (SlurmConfig(cpu_options=["constraint=a"]), 1, "must begin with -"),
        (
            SlurmConfig(options=["--array=0-3"]),
            1,
            "cluster.slurm.options='--array=0-3': would run one trial several times",
        ),
        (SlurmConfig(options=["-a0-3"]), 1, "would run one trial several times"),
        (SlurmConfig(cpu_options=["--a\nb"]), 1, "cluster.slurm.cpu_options="),
        (SlurmConfig(cpu_partition="cpu"), 1, "cluster.slurm.cpu_partition='cpu': has no effect"),
        (SlurmConfig(gpu_type="h100"), 1, "cluster.slurm.gpu_type='h100': has no effect"),
        (SlurmConfig(exclusive=False), 1, "slurm.exclusive=False: gives one core of each node: set cluster.cpus_"),
        (SlurmConfig(cpu_partition="a b"), 1, "cluster.slurm.cpu_partition='a b': must be one word"),
        (SlurmConfig(time="soon"), 1, "cluster.slurm.time='soon': cannot be read"),
        (SlurmConfig(time="4"), 1, "leaves no time to train: the run stops 300 s before it"),
        (SlurmConfig(signal_s=70_000), 1, "must be at most 65535"),
    ],
)
def test_wrong_setting_is_one_line(slurm: SlurmConfig, nodes: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(slurm, nodes)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("1:00:00", 3600), ("2-0", 172_800), ("1-12:30", 131_400), ("1-00:00:10", 86_410)],
)
def test_time_limit_is_read_as_sbatch_does(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("mounts", "is_seen"),
    [
        ([], False),
        (["/other", "/s"], False),
        (["/shared/runs:/runs"], False),
        (["/shared"], True),
        (["/other", "/shared/:/shared:rw"], True),
        (["/shared/runs"], True),
    ],
)
def test_container_must_see_the_trial_folder(mounts: list[str], is_seen: bool) -> None:
    """Else its agents would look for the launcher in vain."""
    slurm = SlurmConfig(container=ContainerConfig(image="i.sif", mounts=mounts))
    config = Config(fileroot="/shared/runs", cluster=ClusterConfig(nodes=1, slurm=slurm))
    with contextlib.nullcontext() if is_seen else pytest.raises(ConfigError, match="mounts=.*: add /shared/runs, or"):
        check_slurm(config)


@pytest.mark.parametrize(("word", "text"), [("90", "90"), ("24:00:00", "24:00:00"), ("1-12:30", "1-12:30")])
def test_time_limit_of_the_command_line(word: str, text: str) -> None:
    config = compose(["experiment=arith", f"cluster.slurm.time={word}"])
    assert config.cluster.slurm.time == text


@pytest.mark.parametrize("text", ["24:00:00", "1:00:10"])
def test_time_limit_in_a_file_needs_quotes(text: str, tmp_path: Path) -> None:
    """YAML reads hours, minutes and seconds as a number of seconds, which sbatch would take as minutes."""
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster" / "own.yaml"
    file.write_text(f"# @package _global_\ncluster:\n  slurm:\n    time: {text}\n")
    with pytest.raises(ConfigError, match='cluster.slurm.time=.*: write time: "24:00:00" in quotes') as caught:
        compose(["experiment=arith", "cluster=own"], config_dir=tmp_path)
    assert "86400" not in caught.value.problem
    file.write_text(file.read_text().replace(text, f"'{text}'"))
    assert compose(["experiment=arith", "cluster=own"], config_dir=tmp_path).cluster.slurm.time == text


HOST = {"REALSYS_HOST": "10.0.0.1"}
SETUP = SlurmConfig(setup=["module load x", "export REALSYS_HOST=$(hostname -i)"])
HANDED = "REALSYS_HOST=.* is handed to all 2 nodes.* set cluster.interface"
NO_SUBNET = "cluster.interface='10.1.0.0/99': cannot be read as a subnet"


@pytest.mark.parametrize(
    ("cluster", "environment", "problem"),
    [
        ({"nodes": 1, "spare_nodes": 1}, {}, "cluster.interface=''.* cannot reach each other on loopback"),
        ({"nodes": 1}, {}, ""),
        ({"nodes": 2, "interface": "ib0"}, {}, ""),
        ({"nodes": 1, "interface": "10.1.0.0/99"}, {}, NO_SUBNET),
        ({"nodes": 2, "interface": "10.1.0.0/99"}, {}, NO_SUBNET),
        # the batch script runs on the first node, and srun hands its variables to all
        ({"nodes": 2}, HOST, HANDED),
        ({"nodes": 2, "interface": "ib0"}, HOST, HANDED),
        ({"nodes": 2, "slurm": SETUP}, {}, HANDED),
        ({"nodes": 2, "slurm": SETUP, "interface": "ib0"}, {}, HANDED),
        ({"nodes": 1}, HOST, ""),
        ({"nodes": 1, "interface": "ib0"}, HOST, ""),
        ({"nodes": 1, "slurm": SETUP}, {}, ""),
        ({"nodes": 1, "slurm": SETUP, "interface": "ib0"}, {}, ""),
        ({"nodes": 2, "interface": "ib0"}, {"REALSYS_HOST": ""}, ""),
    ],
)
def test_nodes_of_a_job_need_a_network(cluster: dict[str, Any], environment: dict[str, str], problem: str) -> None:
    refused = pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext()
    with refused:
        check_network(Config(cluster=ClusterConfig(**cluster)), environment)


def test_request_for_cores_of_two_kinds_is_accepted() -> None:
    slurm = SlurmConfig(exclusive=False, cpu_partition="cpu", gpu_type="h100")
    cluster = ClusterConfig(nodes=2, cpu_nodes=1, gpus_per_node=1, cpus_per_node=8, cpus_per_cpu_node=8, slurm=slurm)
    check_slurm(Config(cluster=cluster))
    with pytest.raises(ConfigError, match="gives one core of each node: set cluster.cpus_per_cpu_node=N"):
        check_slurm(Config(cluster=cluster.model_copy(update={"cpus_per_cpu_node": 0})))

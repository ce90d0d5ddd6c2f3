"""Settings of a job that SLURM, or the batch script, could not take."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.config.schema import Config
from realsys.config.sections.schema_cluster import ClusterConfig
from realsys.config.sections.schema_slurm import ContainerConfig, SlurmConfig
from realsys.errors import ConfigError
from realsys.launch.slurm.slurm_options import check_network, check_slurm, seconds_of


def checked(slurm: SlurmConfig, nodes: int = 1) -> None:
    check_slurm(Config(cluster=ClusterConfig(nodes=nodes, slurm=slurm)))


def test_defaults_are_accepted() -> None:
    checked(SlurmConfig())


@pytest.mark.parametrize(
    ("slurm", "text"),
    [
        (SlurmConfig(partition="a b"), "cluster.slurm.partition='a b': must be one word"),
        (SlurmConfig(setup=["a\nb"]), "cluster.slurm.setup='a\\nb': must be one line"),
        (SlurmConfig(container=ContainerConfig(mounts=["a\nb"])), "cluster.slurm.container.mounts"),
        (SlurmConfig(options=["mail=END"]), "must begin with -"),
        (SlurmConfig(cpu_options=["constraint=a"]), "must begin with -"),
        (SlurmConfig(cpu_options=["--a\nb"]), "cluster.slurm.cpu_options="),
        (SlurmConfig(cpu_partition="cpu"), "cluster.slurm.cpu_partition='cpu': has no effect"),
        (SlurmConfig(gpu_type="h100"), "cluster.slurm.gpu_type='h100': has no effect"),
        (SlurmConfig(exclusive=False), "cluster.slurm.exclusive=False: gives one core of each node: set cluster.cpus_"),
        (SlurmConfig(cpu_partition="a b"), "cluster.slurm.cpu_partition='a b': must be one word"),
        (SlurmConfig(time="soon"), "cluster.slurm.time='soon': cannot be read"),
        (SlurmConfig(time="4"), "leaves no time to train: the run stops 300 s before it"),
        (SlurmConfig(signal_s=70_000), "must be at most 65535"),
    ],
)
def test_wrong_setting_is_one_line(slurm: SlurmConfig, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(slurm)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_job_needs_a_number_of_nodes() -> None:
    with pytest.raises(ConfigError, match="cluster.nodes=0"):
        checked(SlurmConfig(), nodes=0)


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


def test_nodes_of_a_job_need_a_common_network() -> None:
    with pytest.raises(ConfigError, match="cluster.interface=''.* cannot reach each other on loopback"):
        check_network(Config(cluster=ClusterConfig(nodes=1, spare_nodes=1)), {})
    check_network(Config(cluster=ClusterConfig(nodes=1)), {})
    check_network(Config(cluster=ClusterConfig(nodes=2, interface="ib0")), {})


@pytest.mark.parametrize("interface", ["", "ib0"])
@pytest.mark.parametrize(
    ("environment", "setup"),
    [({"REALSYS_HOST": "10.0.0.1"}, []), ({}, ["module load x", "export REALSYS_HOST=$(hostname -i)"])],
)
def test_one_address_is_refused_for_several_nodes(
    environment: dict[str, str], setup: list[str], interface: str
) -> None:
    """The batch script runs on the first node, and srun hands its variables to all."""
    slurm = SlurmConfig(setup=setup)
    with pytest.raises(ConfigError, match="REALSYS_HOST=.* is handed to all 2 nodes.* set cluster.interface"):
        check_network(Config(cluster=ClusterConfig(nodes=2, interface=interface, slurm=slurm)), environment)
    check_network(Config(cluster=ClusterConfig(nodes=1, interface=interface, slurm=slurm)), environment)
    check_network(Config(cluster=ClusterConfig(nodes=2, interface="ib0")), {"REALSYS_HOST": ""})


def test_request_for_cores_of_two_kinds_is_accepted() -> None:
    slurm = SlurmConfig(exclusive=False, cpu_partition="cpu", gpu_type="h100")
    cluster = ClusterConfig(nodes=2, cpu_nodes=1, gpus_per_node=1, cpus_per_node=8, cpus_per_cpu_node=8, slurm=slurm)
    check_slurm(Config(cluster=cluster))
    with pytest.raises(ConfigError, match="gives one core of each node: set cluster.cpus_per_cpu_node=N"):
        check_slurm(Config(cluster=cluster.model_copy(update={"cpus_per_cpu_node": 0})))


@pytest.mark.parametrize("nodes", [1, 2])
def test_subnet_in_a_wrong_form_is_refused(nodes: int) -> None:
    with pytest.raises(ConfigError, match="cluster.interface='10.1.0.0/99': cannot be read as a subnet"):
        check_network(Config(cluster=ClusterConfig(nodes=nodes, interface="10.1.0.0/99")), {})

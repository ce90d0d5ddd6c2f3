"""The variables of an allocation."""

from __future__ import annotations

import pytest

from realsys.launch.slurm.launcher import SlurmAllocation, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_hosts_are_those_of_scontrol(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


def test_allocation_has_the_fewest_cpus() -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_RESTART_COUNT": "2",
    }
    assert SlurmAllocation.read(env) == SlurmAllocation("7", ["n1", "n2", "n3"], 8, 4, 2)


def test_heterogeneous_job_has_two_components() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c1", "SLURM_HET_SIZE": "2", "SLURM_RESTART_COUNT": "1"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "c1", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "64"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "32(x2)"}
    light = SlurmAllocation("7", ["c1"], 64, restarts=1, group=0)
    assert SlurmAllocation.components(env) == [light, SlurmAllocation("7", ["g1", "g2"], 32, restarts=1, group=1)]


def test_no_allocation_without_a_job() -> None:
    assert SlurmAllocation.read({}) is None and SlurmAllocation.components({}) == []


def test_unreadable_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        SlurmAllocation.read({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[x-3]"})

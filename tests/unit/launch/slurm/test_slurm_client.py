"""Output of SLURM's programs as it is read."""

import os
from pathlib import Path

import pytest

from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, SlurmConfig
from realsys.errors import ConfigError
from realsys.launch.slurm import client
from realsys.launch.slurm.client import JobState, SlurmError, job_state, job_states

#: job 1 is heterogeneous
SQUEUE = """\
1+0|PENDING|Resources|n/a|2026-01-02T03:04:05
1+1|PENDING|None|n/a|N/A
3|RUNNING|None|a1|2026-01-02T03:04:05
"""
SCONTROL = """\
JobId=1 HetJobOffset=0 JobState=RUNNING Reason=None ExitCode=0:0 StartTime=2026-01-02T03:04:05 BatchHost=c1
JobId=2 HetJobOffset=1 JobState=COMPLETING Reason=None ExitCode=0:9 StartTime=Unknown BatchHost=g1
"""


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    def call(command):
        return SQUEUE if command[0] == "squeue" else SCONTROL

    monkeypatch.setattr(client, "_call", call)


def test_first_component_stands_for_a_job():
    found = job_states(["1", "3", "9"])
    assert found["1"] == JobState("PENDING", "Resources", start="2026-01-02T03:04:05")
    assert sorted(found) == ["1", "3"] and found["3"].host == "a1"
    assert job_state("1") == JobState("RUNNING", "", "c1", "2026-01-02T03:04:05", 0)


def test_machine_without_the_programs_has_no_slurm(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    assert not client.is_here()


@pytest.mark.parametrize(
    ("refused", "field"), [("gpu", "partition='gpu'"), ("gpu_c", "cpu_partition='gpu_c'"), ("", "partition='gpu'")]
)
def test_refused_partition_names_its_field(refused, field, monkeypatch):
    """Newer versions of sbatch name the partition."""

    def call(command):
        if command[0] == "sinfo":
            return "cpu gpus"
        shown = f"specified: {refused}; Batch job" if refused else "name"
        raise SlurmError(f"sbatch: invalid partition {shown} submission failed: Invalid partition name specified")

    monkeypatch.setattr(client, "_call", call)
    slurm = SlurmConfig(partition="gpu", cpu_partition="gpu_c")
    with pytest.raises(ConfigError, match=rf"cluster.slurm.{field}: sbatch: .*\(partitions: cpu, gpus\)"):
        client.submit(Config(cluster=ClusterConfig(slurm=slurm)), Path("job.sh"))

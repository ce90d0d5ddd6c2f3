"""The launcher ``slurm`` with a stand-in for srun."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError
from realsys.launch.slurm.launcher import SlurmLauncher
from tests.support.polling import poll

#: the step of the agents ends at once, that of the guards lasts
SRUN = """#!/bin/sh
case "$*" in *job-name=agents*) echo refused; exit 3;; esac
echo $$ > {folder}/guards
exec sleep 300
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    """It runs in job 7, which was queued again twice."""
    (tmp_path / "srun").write_text(SRUN.format(folder=tmp_path))
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "a").mkdir()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2"}
    for name, value in {**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    return SlurmLauncher(Config(cluster=ClusterConfig(nodes=2)), TrialPaths(tmp_path / "a"))


def test_run_ends_its_guards_and_earlier_ones(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """A guard of an earlier run of the job ends when its file comes."""
    said: list[str] = []

    async def body() -> None:
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


def test_spares_must_leave_a_node(launcher: SlurmLauncher) -> None:
    one = Config(cluster=ClusterConfig(spare_nodes=1))
    assert launcher.settings(one)["cluster.nodes"] == (1, "job 7 has 2 nodes")
    all_of_them = Config(cluster=ClusterConfig(spare_nodes=2))
    with pytest.raises(ConfigError, match="cluster.spare_nodes=2: leave no node for the trial: job 7 has 2 nodes"):
        launcher.settings(all_of_them)


def test_address_of_the_environment_suits_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALSYS_HOST", "10.0.0.1")
    SlurmLauncher.check(Config(cluster=ClusterConfig(nodes=1)))
    with pytest.raises(ConfigError, match="REALSYS_HOST='10.0.0.1': is handed to all 2 nodes"):
        SlurmLauncher.check(Config(cluster=ClusterConfig(nodes=2)))

"""The etcd that a run starts for itself, in a job whose processes all get SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from realsys.cluster.network import free_ports
from realsys.cluster.process import SHIELDED
from realsys.cluster.store.etcd_store import EtcdNameStore
from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config

BOUND_S = 60.0

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    store = {"backend": "etcd", "start": True, "address": f"127.0.0.1:{free_ports(1)[0]}"}
    made = Config.model_validate({"fileroot": str(tmp_path), "cluster": {"name_store": store}})
    write_config(made, TrialPaths(tmp_path).config)
    return made


@pytest.fixture
def worker(tmp_path: Path, config: Config) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "realsys.workers.name_store", "--trial-dir", str(tmp_path), "--index", "0"]
    process = subprocess.Popen(argv, env={**os.environ, SHIELDED: "1"})
    yield process
    process.kill()
    process.wait(BOUND_S)


def test_etcd_of_a_job_outlives_sigterm(worker: subprocess.Popen[bytes], config: Config) -> None:
    """scancel sends SIGTERM to every process. The last checkpoint needs the leases of the workers."""
    store = EtcdNameStore(config.cluster.name_store.address, BOUND_S, BOUND_S, known=True)
    try:
        lease = store.lease(30.0)
        store.add("r/key", "1", lease=lease)
        [etcd] = psutil.Process(worker.pid).children()
        for process in (etcd, worker):
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs([etcd], BOUND_S)
        assert store.get("r/key") == "1"
        lease.keep_alive()
    finally:
        store.close()
    [etcd] = psutil.Process(worker.pid).children()
    worker.send_signal(signal.SIGINT)
    assert worker.wait(BOUND_S) == 0
    assert not etcd.is_running()

"""Processes that die: which processes stop, and what the user reads."""

import json

import pytest

from tests.support.jobs.jobs import arith, poll, processes_of, running
from tests.system.conftest import ENDLESS

pytestmark = pytest.mark.system


def test_dead_model_worker_ends_run_without_recovery(tmp_path):
    # Two ranks: the survivor complains about its lost peer, and that must not be taken for the cause.
    root, argv = arith(tmp_path, "killed", *ENDLESS, "allocation=sglang.d1p1m1+d2p1m1", "recover=off")
    with running(root, argv) as live:
        live.until_step(1)
        pid = live.kill("model_worker/0")
        job = live.wait()
    assert job.returncode == 1, job.report()
    assert f"realsys: the run failed: model_worker/0 (pid {pid}): was killed by SIGKILL" in job.stderr
    assert processes_of(root) == []
    failure = json.loads(job.paths.summary.read_text())["failure"]
    assert failure["process"] == "model_worker/0"


def test_dead_launcher_takes_all_workers_with_it(tmp_path):
    root, argv = arith(tmp_path, "orphaned", *ENDLESS)
    with running(root, argv) as live:
        live.until_step(1)
        live.process.kill()
        live.wait()
    poll(lambda: not processes_of(root), "no worker is left", lambda: "\n".join(processes_of(root)), timeout_s=10)

"""Processes that die and users that interrupt: what stops, what goes on, what is said, what is left."""

import json
import signal

import pytest

from tests.support.jobs.jobs import arith, poll, processes_of, running

pytestmark = pytest.mark.system

QUICK = ["warmup.steps=2", "evaluation.problems=0", "train.batch_groups=4", "rollout.group_size=2"]
ENDLESS = [*QUICK, "rollout.workers=1", "train.total_steps=100000"]


def test_ctrl_c_in_mid_training_stops_everything_within_ten_seconds(tmp_path):
    root, argv = arith(tmp_path, "interrupted", *ENDLESS)
    with running(root, argv) as live:
        live.until_step(2)
        live.process.send_signal(signal.SIGINT)
        live.until(lambda: not processes_of(root), "no worker is left", timeout_s=10)
        job = live.wait()  # it writes its report
    assert job.returncode == 130, job.report()
    assert processes_of(root) == []
    assert "stopped by SIGINT" in job.stderr
    assert "Traceback" not in job.stdout + job.stderr
    summary = json.loads(job.paths.summary.read_text())
    assert summary["status"] == "interrupted" and summary["steps"] >= 2
    assert summary["killed_at_stop"] == [], job.report()  # all of them ended by themselves
    assert not list(job.paths.errors.glob("*")), job.report()


def test_death_of_a_model_worker_ends_a_run_without_recovery_and_is_named(tmp_path):
    # Two ranks: the one that is left complains about its lost peer, and that must not be taken for the cause.
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


def test_death_of_the_launcher_takes_all_workers_with_it(tmp_path):
    root, argv = arith(tmp_path, "orphaned", *ENDLESS)
    with running(root, argv) as live:
        live.until_step(1)
        live.process.kill()
        live.wait()
    poll(lambda: not processes_of(root), "no worker is left", lambda: "\n".join(processes_of(root)), timeout_s=10)

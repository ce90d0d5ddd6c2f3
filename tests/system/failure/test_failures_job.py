"""Processes that die: which processes stop, and what the user reads."""

import json

import pytest

from realsys.train.record_files import recorded_steps
from tests.support.jobs.jobs import arith, processes_of, realsys, run_arith, running
from tests.support.polling import poll
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
    poll(lambda: not processes_of(root), "no worker is left", 10, lambda: "\n".join(processes_of(root)))


def test_nan_step_is_recorded_and_replayed(tmp_path):
    """The last step of a run that diverged can be looked at, and repeated bit by bit."""
    few = ["train.batch_groups=4", "rollout.group_size=2", "rollout.workers=1", "evaluation.problems=0"]
    # The squares of such gradients are infinite in fp32.
    huge = ["train.ppo.reward_scale=1e30", "train.ppo.reward_clip=1e38"]
    raw = ["train.ppo.advantage.mean=none", "train.ppo.advantage.std=none"]
    diverging = [*huge, *raw, "checkpoint.every_steps=1"]
    job = run_arith(tmp_path, "diverged", "warmup.steps=2", *few, *diverging)
    assert job.returncode == 1 and "NotFiniteError: actor: 5 optimizer steps in a row" in job.stderr, job.report()
    assert "exited with code 1" not in job.stderr.splitlines()[0]
    steps = recorded_steps(job.paths.records)
    assert max(steps) == len(job.records("train")) + 1
    replayed = realsys("replay", job.root)
    assert replayed.returncode == 0 and "bit-equal" in replayed.stdout, replayed.stderr

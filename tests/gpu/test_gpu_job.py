"""Whole arith jobs on GPUs in bfloat16: accuracy rises; kills are survived; the audit is clean."""

import json

import pytest

from realsys.launch.commands.audit import audit_trial
from tests.gpu.conftest import STAND_IN
from tests.support.jobs.jobs import arith, command, processes_of, run, running

pytestmark = [pytest.mark.gpu, pytest.mark.system]
SETTINGS = ["allocation=auto", "model.dtype=bfloat16", "cluster.connect_timeout_s=120"]
KILLED_STEPS, BOUND_S = 8, 200.0
#: Steps of the shipped job, whose accuracy rises by 30 points in 30 steps. The stand-in only begins to learn.
LEARNT_STEPS, RISE = (2, -1.0) if STAND_IN else (30, 0.15)
SHORTER = ["warmup.steps=4", "evaluation.problems=16", "train.batch_groups=8"] if STAND_IN else []


def check(job, steps):
    job.completed()
    assert [record["step"] for record in job.records("train")] == list(range(1, steps + 1))
    assert audit_trial(job.paths).ok, job.report()
    assert processes_of(job.root) == []
    if not STAND_IN:
        gpu = job.records("train")[-1]["gpu"]
        assert gpu["peak_bytes"] > 0 and 0 <= gpu.get("utilisation", 0.0) <= 1  # without pynvml the latter is absent


@pytest.mark.timeout(400)
def test_accuracy_rises(tmp_path):
    """With one GPU, server and trainer share it."""
    settings = [*SETTINGS, *SHORTER, f"train.total_steps={LEARNT_STEPS}"]
    job = run(
        tmp_path / "arith" / "learns",
        command("experiment=arith", f"fileroot={tmp_path}", "trial=learns", *settings),
        timeout_s=BOUND_S,
    )
    check(job, LEARNT_STEPS)
    accuracy = json.loads(job.paths.summary.read_text())["accuracy"]
    assert accuracy["after"] - accuracy["before"] >= RISE, accuracy


@pytest.mark.timeout(600)
def test_job_survives_kills_of_server_and_rank(tmp_path):
    settings = [*SETTINGS, f"train.total_steps={KILLED_STEPS}", "checkpoint.every_steps=2"]
    root, argv = arith(tmp_path, "killed", *settings)
    with running(root, argv) as live:
        live.until_step(2, BOUND_S)
        live.kill("generation_server/0")
        live.until_step(4, BOUND_S)
        live.kill("model_worker/0")
        job = live.wait(BOUND_S)
    check(job, KILLED_STEPS)

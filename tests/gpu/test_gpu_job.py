"""A whole arith job on GPUs in bfloat16: it ends, survives kills, and its audit is clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from realsys.launch.commands.audit import audit_trial
from tests.support.jobs.jobs import Job, arith, processes_of, running

pytestmark = [pytest.mark.gpu, pytest.mark.system]
SETTINGS = ["allocation=auto", "model.dtype=bfloat16", "cluster.connect_timeout_s=120"]
STEPS, BOUND_S = 8, 280.0


def check(job: Job) -> None:
    job.completed()
    assert [record["step"] for record in job.records("train")] == list(range(1, STEPS + 1))
    assert audit_trial(job.paths).ok, job.report()
    assert processes_of(job.root) == []


@pytest.mark.timeout(600)
def test_job_survives_kills_of_server_and_rank(tmp_path: Path) -> None:
    """With one GPU, server and trainer share it."""
    settings = [*SETTINGS, f"train.total_steps={STEPS}", "checkpoint.every_steps=2"]
    root, argv = arith(tmp_path, "killed", *settings)
    with running(root, argv) as live:
        live.until_step(2, BOUND_S)
        live.kill("generation_server/0")
        live.until_step(4, BOUND_S)
        live.kill("model_worker/0")
        job = live.wait(BOUND_S)
    check(job)
    gpu = job.records("train")[-1].get("gpu")
    assert gpu is None or gpu["peak_bytes"] > 0

"""The same job on every training layout: the same losses, whatever the parallelism."""

import pytest

from tests.system.jobs import run_job

pytestmark = pytest.mark.system

ARGUMENTS = [
    "asynchronous.max_head_offpolicyness=0",  # batch k is exactly the k-th B tickets, whatever the timing
    "evaluation.problems=0",
    "train.total_steps=2",
    "warmup.steps=8",
]


def test_layouts_run_the_same_job_to_the_same_loss(tmp_path):
    losses, rewards = {}, {}
    for layout in ("d1p1m1", "d2p1m1", "d1p2m1", "d1p1m2"):
        job = run_job(tmp_path, layout, f"allocation=sglang.d1p1m1+{layout}", *ARGUMENTS)
        assert job.returncode == 0, layout + job.stdout[-2000:] + job.stderr[-2000:] + job.logs()
        losses[layout] = [r["loss"] for r in job.records("warmup")]
        first = job.records("train")[0]
        rewards[layout] = [
            first["reward_mean"],
            first["answer_tokens"],
            first["stats"]["loss"],
            first["stats"]["grad_norm"],
        ]
        assert job.records("train")[-1]["staleness"]["max"] == 0
    for layout in losses:
        assert losses[layout] == pytest.approx(losses["d1p1m1"], rel=2e-5), layout
        assert rewards[layout] == pytest.approx(rewards["d1p1m1"], rel=1e-3, abs=1e-5), layout

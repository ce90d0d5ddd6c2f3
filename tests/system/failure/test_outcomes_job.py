"""Runs that have nothing (more) to learn from: each ends in time with a message that names the cause."""

import json
import re

import pytest

from realsys.train.master.intake_decisions import FEWEST_FILTERED
from tests.support.jobs.jobs import processes_of, run_arith
from tests.support.jobs.ledgers import check_ledger

pytestmark = pytest.mark.system

#: Short answers of a model without warm-up: all wrong.
TINY = [
    "warmup.steps=0",
    "evaluation.problems=0",
    "rollout.workers=1",
    "rollout.group_size=2",
    "rollout.max_concurrent=32",
    "generation.sampling.max_new_tokens=4",
    "data.arith.max_operands=3",
    "data.arith.demo_size=0",
    "data.arith.train_size=20",
]
ALL_FILTERED = ["train.ppo.filter.min=0.5", "train.total_steps=3"]  # half of the answers must be right


def stuck(job):
    """Check that a run gave up; return the first line of its terminal output."""
    assert job.returncode == 1, job.report()
    assert processes_of(job.root) == []
    failure = json.loads(job.paths.summary.read_text())["failure"]
    assert failure["process"] == "master_worker/0" and "StuckError" in failure["problem"]
    assert job.records("train") == []
    message = job.stderr.splitlines()[0]
    assert "master_worker/0" in message and "StuckError" in message
    return message


def test_used_up_data_ends_after_its_last_batch(tmp_path):
    """20 prompts once, 8 a batch: two steps. The remaining four make no batch; they replace any that fail."""
    job = run_arith(tmp_path, "short", *TINY, "train.total_epochs=1", "train.total_steps=100").completed()
    assert [step["step"] for step in job.records("train")] == [1, 2]
    assert "step 2/2" in job.stdout
    limit = "train.total_epochs=1: the data gives 2 batches of 8"
    assert re.search(rf"^ended by +{re.escape(limit)}$", job.stdout, re.MULTILINE), job.report()
    summary = json.loads(job.paths.summary.read_text())
    assert (summary["status"], summary["ended_by"]) == ("done", limit)
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=20)
    assert ledger.counts.trained == 16 and ledger.counts.granted <= 20
    assert processes_of(job.root) == []


def test_used_up_data_without_batch_ends_by_name(tmp_path):
    job = run_arith(tmp_path, "used-up", *TINY, *ALL_FILTERED, "train.total_epochs=1")
    message = stuck(job)
    assert "all 20 groups have ended: 0 trained, 20 dropped (20 x filtered success_rate)" in message
    assert "fewer than the 8 of a batch (train.batch_groups)" in message


def test_endless_rejected_data_ends_by_name(tmp_path):
    job = run_arith(tmp_path, "rejected", *TINY, *ALL_FILTERED)
    message = stuck(job)
    found = re.search(r"the last (\d+) groups were all filtered out, 100% of all groups", message)
    assert found and int(found[1]) >= FEWEST_FILTERED, message
    assert "widen train.ppo.filter" in message


def test_constant_reward_changes_no_weight_and_is_reported(tmp_path):
    """Every advantage is 0: no NaN, no step skipped, and the summary names it."""
    job = run_arith(
        tmp_path, "constant", *TINY, "train.ppo.advantage.mean=group", "train.ppo.advantage.std=group"
    ).completed()
    steps = job.records("train")
    assert len(steps) == 4 and {step["reward_mean"] for step in steps} == {-1.0}
    for step in steps:
        assert step["stats"]["grad_norm_max"] == step["stats"]["loss"] == step["stats"]["skipped_steps"] == 0.0
    assert json.loads(job.paths.summary.read_text())["without_signal"] == 4
    assert "4 of 4 steps: every advantage was 0" in job.stdout
    assert "train.total_steps=4" in job.stdout
    assert not list(job.paths.errors.glob("*")), job.report()

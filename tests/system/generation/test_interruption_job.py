"""Weights change in the middle of completions, on two servers."""

import pytest

from tests.support.jobs.jobs import processes_of, realsys, run_arith
from tests.support.jobs.ledgers import check_ledger, check_staleness

pytestmark = pytest.mark.system


def test_completions_continue_with_new_weights(tmp_path):
    job = run_arith(
        tmp_path,
        "two-servers",
        "allocation=sglang.d2p1m1+d1p1m1",
        "rollout.workers=2",
        "rollout.group_size=2",
        "warmup.steps=2",
        "evaluation.problems=0",
        "train.batch_groups=4",
        "train.total_steps=12",
        "asynchronous.max_staleness=2",
        # One completion at a time: a batch takes longer than a train step, so updates meet running completions.
        "generation.embedded.max_running=1",
        "generation.sampling.min_new_tokens=150",
        "generation.sampling.max_new_tokens=180",
        "generation.embedded.context_length=256",
    ).completed()
    steps = job.records("train")
    assert len(steps) == 12
    assert any(step["interrupted_fraction"] > 0 for step in steps)
    assert steps[0]["interrupted_fraction"] <= 1 and steps[0]["staleness"]["max"] <= 0  # only v0 was there
    check_staleness(job, eta=2)
    check_ledger(job, batch_groups=4, eta=2, prompts=400)
    manager = (job.paths.logs / "gserver_manager-0.log").read_text()
    for server in ("generation_server/0", "generation_server/1"):
        assert f"{server}: serves version " in manager
    assert processes_of(job.root) == []


def test_job_tells_which_tokens_stand_on_kept_keys(tmp_path):
    """Their recorded log-probs are of mixed weights; the monitor compares the others only, so it still agrees.

    Every step is replayed from its record, with the versions of the keys.
    """
    job = run_arith(
        tmp_path,
        "kept-keys",
        "rollout.group_size=2",
        "warmup.steps=2",
        "evaluation.problems=0",
        "train.batch_groups=4",
        "train.total_steps=8",
        "train.optimizer.lr=0.002",
        "asynchronous.max_staleness=2",
        "asynchronous.kv_on_update=keep",
        "asynchronous.kv_reuse_versions=1",
        "generation.embedded.max_running=1",
        "generation.sampling.min_new_tokens=150",
        "generation.sampling.max_new_tokens=180",
        "generation.embedded.context_length=256",
    ).completed()
    steps = job.records("train")
    kept = [step for step in steps if step["kept_keys_fraction"] > 0]
    assert kept and all(step["interrupted_fraction"] > 0 for step in kept)
    assert sum(step["agreement"]["tokens"] for step in steps) > 0
    for step in steps:
        if step["agreement"]["tokens"]:
            assert step["agreement"]["difference_max"] < 1e-3, step
    replayed = realsys("replay", job.root)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("bit-equal") == len(steps)

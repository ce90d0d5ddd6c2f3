"""A whole job with every choice by outcome: filter and refill, over-sampling, choice of episodes, curriculum."""

import pytest

from tests.support.jobs.jobs import run_arith
from tests.support.jobs.ledgers import check_ledger

pytestmark = pytest.mark.system

SETTINGS = [
    "train.ppo.filter.accept=unequal_rewards",
    "rollout.oversample=2",
    "rollout.keep.episodes=3",
    "data.curriculum.max=0.8",
    "generation.progress_s=0.05",  # completions are short, and each shall end for itself
    # Sums so short that a fresh model is right now and then.
    "data.arith.max_operands=2",
    "data.arith.max_operand=3",
    "warmup.steps=40",
    "rollout.workers=1",
    "evaluation.problems=8",
    "train.total_steps=4",
]


def test_every_choice_by_outcome_ends_each_ticket_once(tmp_path):
    job = run_arith(tmp_path, "sampling", *SETTINGS).completed()
    steps = job.records("train")
    assert [step["signal"]["equal"] for step in steps] == [0.0] * 4, "a group without a signal was trained"
    assert [step["episodes"] for step in steps] == [8 * 3] * 4
    reasons = {reason for step in steps for reason in step["untrained"]}
    assert reasons >= {"equal_rewards", "not_kept", "over_sampled"}
    ledger = check_ledger(job, batch_groups=8, eta=4, prompts=400)
    filtered = sum(step["dropped_filtered"] for step in steps)
    assert 0 < filtered <= ledger.counts.filtered()["equal_rewards"]
    shares = ledger.rates.shares()
    assert 0 < shares["unseen"] < 1 and sum(shares.values()) == pytest.approx(1.0)

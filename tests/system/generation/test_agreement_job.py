"""Log-probs of the generation engine against the trainer's, for the same weights, in whole jobs."""

import pytest

from tests.support.jobs.jobs import run_arith

pytestmark = pytest.mark.system

NOISE = 1e-4  # nats; fp32 on both sides, answers of up to 180 tokens
QUICK = ["evaluation.problems=0", "rollout.workers=1"]


def test_engine_and_trainer_agree_without_learning(tmp_path):
    """At a learning rate of nothing all versions are the same weights: whatever sampled a token, both must agree."""
    job = run_arith(
        tmp_path,
        "no-learning",
        "train.optimizer.lr=1e-30",
        "train.total_steps=6",
        "asynchronous.max_staleness=0",
        *QUICK,
    ).completed()
    steps = job.records("train")
    assert [step["agreement"]["version"] for step in steps] == [0, 1, 2, 3, 4, 5]
    for step in steps:
        found = step["agreement"]
        assert found["tokens"] == step["answer_tokens"], "nothing older may be trained at eta 0"
        assert 0 < found["difference_mean"] < found["difference_max"] < NOISE
        assert abs(found["ratio"] - 1) < NOISE and found["warning"] == ""
        assert step["stats"]["agreement/difference_max"] == found["difference_max"]
        assert step["stats"]["inf/logprob_difference_max"] < NOISE


def test_interrupted_completions_are_compared_exactly(tmp_path):
    """The weights move, and answers span versions: their last tokens are the trained version's, on a new prefix.

    One answer at a time is generated, so that a batch of them takes longer than a train step however loaded the
    machine is: whenever a version is published, part of the next batch is done and an answer of it is running.
    """
    job = run_arith(
        tmp_path,
        "mixed",
        "train.optimizer.lr=1e-3",
        "train.total_steps=6",
        "train.batch_groups=4",
        "rollout.group_size=2",
        "generation.embedded.max_running=1",
        "warmup.steps=2",
        "asynchronous.max_staleness=1",
        "generation.sampling.min_new_tokens=150",
        "generation.sampling.max_new_tokens=180",
        "generation.embedded.context_length=256",
        *QUICK,
    ).completed()
    steps = job.records("train")
    mixed = [step for step in steps if 0 < step["agreement"]["tokens"] < step["answer_tokens"]]
    assert len(mixed) >= len(steps) // 2, f"{len(mixed)} of {len(steps)} batches hold an interrupted answer"
    for step in mixed:
        assert step["agreement"]["difference_max"] < NOISE
    # the same comparison over all tokens has the change of the weights in it
    assert max(step["stats"]["inf/logprob_difference_max"] for step in mixed) > 100 * NOISE
    assert not any(step["agreement"]["warning"] for step in steps)

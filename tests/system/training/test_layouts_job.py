"""The same job on every training layout: the same losses, whatever the parallelism."""

import pytest

from tests.support.jobs.jobs import run_arith

pytestmark = pytest.mark.system

ARGUMENTS = [
    "rollout.workers=1",
    "asynchronous.max_staleness=0",  # batch k is exactly the k-th B tickets, whatever the timing
    "evaluation.problems=0",
    "train.total_steps=2",
    "warmup.steps=8",
    # Adam divides a gradient of nothing but rounding by its own size: without a floor the layouts' weights, and then
    # now and then a sampled token, would differ for no reason but the order of additions.
    "warmup.optimizer.eps=1e-3",
]

SAMPLED = ("reward_mean", "answer_tokens", "length_max", "truncated_fraction")  # the same answers, to the token


def test_all_layouts_reach_the_same_loss(tmp_path):
    losses, steps = {}, {}
    for layout in ("d1p1m1", "d2p1m1", "d1p2m1", "d1p1m2"):
        job = run_arith(tmp_path, layout, f"allocation=sglang.d1p1m1+{layout}", *ARGUMENTS).completed()
        losses[layout] = [r["loss"] for r in job.records("warmup")]
        steps[layout], second = job.records("train")
        assert second["staleness"]["max"] == 0
    reference = steps["d1p1m1"]
    assert losses["d1p1m1"][-1] < 0.95 * losses["d1p1m1"][0]
    assert reference["stats"]["grad_norm"] > 0.01
    for layout, step in steps.items():
        # 1e-5: single precision, a few hundred terms per sum, added in another order
        assert losses[layout] == pytest.approx(losses["d1p1m1"], rel=1e-5), layout
        assert [step[k] for k in SAMPLED] == [reference[k] for k in SAMPLED], layout
        for name in ("loss", "grad_norm"):  # over four optimizer steps, each on what the one before left
            assert step["stats"][name] == pytest.approx(reference["stats"][name], rel=1e-4), (layout, name)

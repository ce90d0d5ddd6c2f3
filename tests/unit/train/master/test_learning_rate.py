"""The learning-rate schedule at its corners."""

import pytest

from realsys.config.schema_train import OptimizerConfig
from realsys.train.master.step import learning_rate


def optimizer(**fields):
    return OptimizerConfig.model_validate({"lr": 1.0, "warmup_fraction": 0.0, **fields})


def rates(cfg, total):
    return [learning_rate(cfg, step, total) for step in range(total)]


def test_warm_up_starts_above_zero_reaches_full_rate():
    assert rates(optimizer(warmup_fraction=0.4), 10)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_constant_stays():
    assert rates(optimizer(), 4) == [1.0] * 4


def test_linear_reaches_the_floor_at_the_last_step():
    cfg = optimizer(schedule="linear", min_lr_ratio=0.2, warmup_fraction=0.2)
    assert rates(cfg, 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle():
    cfg = optimizer(schedule="cosine", min_lr_ratio=0.2)
    assert learning_rate(cfg, 4, 10) == pytest.approx(0.6)
    assert learning_rate(cfg, 9, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_never_rise_after_warm_up(schedule):
    """Beyond the last step the rate stays as it is."""
    cfg = optimizer(schedule=schedule, min_lr_ratio=0.1, warmup_fraction=0.1)
    after = rates(cfg, 50)[4:]
    assert after == sorted(after, reverse=True)
    assert learning_rate(cfg, 500, 50) == pytest.approx(after[-1])


def test_warm_up_over_everything():
    assert rates(optimizer(warmup_fraction=1.0, schedule="linear"), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_rounding_adds_no_warm_up_step():
    assert learning_rate(optimizer(warmup_fraction=0.07), 6, 100) == 1.0  # 0.07 * 100 > 7 in floats


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (0, 0)])
def test_steps_outside_the_run_are_refused(step, total):
    with pytest.raises(ValueError, match=f"step {step} of {total}"):
        learning_rate(optimizer(), step, total)

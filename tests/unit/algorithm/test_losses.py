"""The loss door: losses of the user with arguments, episode ratios and clip statistics; losses that are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realsys.algorithm.loss import actor_loss, finish_stats, try_loss
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.losses import Surrogate, episode_level, load_loss
from realsys.algorithm.token_losses import WINDOW_STEPS, TokenLosses, ks_distance
from realsys.config.doors import LOSS
from realsys.config.schema_train import PPOConfig
from realsys.errors import ConfigError
from realsys.types import SampleMeta

HERE = __name__
# log u = 0.2, -0.5, -0.5, 1.0 and log w = 0.3, -0.1, 0, -0.2
THETA = [-1.0, -2.0, -2.0, -0.5]
PROX = [-1.2, -1.5, -1.5, -1.5]
BEHAV = [-1.5, -1.4, -1.5, -1.3]
ADVANTAGES = [2.0, -1.0, 2.0, -3.0]


def ratio(inputs, scale=1.0):
    return -scale * inputs.u * inputs.advantages


@episode_level
def episode_ratio(inputs):
    return Surrogate(ratio(inputs), clipped=inputs.u > 1.2)


def mean(inputs):
    return ratio(inputs).mean()


def number(inputs):
    return 0.5


def bad_flags(inputs):
    return Surrogate(ratio(inputs), clipped=torch.tensor(True))


def detached(inputs):
    return ratio(inputs).detach()


def log_of_masked(inputs):
    return (-inputs.theta).log() / inputs.advantages  # both are 0 at masked tokens


def log_of_less_than_nothing(inputs):
    return (inputs.u - 1).log()


def largest_ratio(inputs):
    return ratio(inputs) / inputs.u.max()  # of no token there is none


def asks_for_more(inputs):
    return inputs.no_such_field  # type: ignore[attr-defined, no-any-return]


def config(function, **fields):
    return PPOConfig.model_validate({"loss": f"{HERE}:{function}", **fields})


def run(cfg, mask=None):
    mask = torch.ones(4, dtype=torch.bool) if mask is None else mask
    theta = torch.tensor(THETA, requires_grad=True)
    others = (torch.tensor(column) for column in (PROX, BEHAV, ADVANTAGES))
    rows = Segments(torch.tensor([2, 2]))
    loss, stats = actor_loss(theta, *others, mask, 4.0, cfg, loss=load_loss(cfg), segments=rows)
    loss.backward()
    return loss.item(), theta.grad.tolist(), finish_stats({name: value.item() for name, value in stats.items()})


# -w * u * A: -e^0.5 * 2, e^-0.6, -e^-0.5 * 2, e^0.8 * 3
TERMS = [-3.2974425, 0.5488116, -1.2130613, 6.6766228]


def test_shared_code_weighs_and_averages_an_own_loss():
    loss, gradient, stats = run(config("ratio"))
    assert loss == pytest.approx(sum(TERMS) / 4, rel=1e-6)
    assert gradient == pytest.approx([term / 4 for term in TERMS], rel=1e-6)
    assert (stats["clip_fraction"], stats["dual_clip_fraction"], stats["tokens"]) == (0, 0, 4)


def test_cap_and_mask_apply_to_an_own_loss():
    cfg = config("ratio", behav_imp_weight_cap=1.2, behav_imp_weight_mode="truncate")
    loss, gradient, stats = run(cfg, torch.tensor([True, False, True, True]))
    first = -1.2 * 1.2214028 * 2  # w = e^0.3 is set to 1.2
    assert loss == pytest.approx((first + TERMS[2] + TERMS[3]) / 4, rel=1e-6)
    assert gradient[1] == 0.0 and stats["capped_fraction"] == pytest.approx(1 / 3)


def test_nan_at_masked_tokens_reaches_nothing():
    loss, gradient, _ = run(config("log_of_masked"), torch.tensor([True, True, False, True]))
    # w * log(-theta) / A, with the gradient w / (theta * A)
    assert loss == pytest.approx((0.0 - 0.9048374 * 0.6931472 + 0.8187308 * -0.6931472 / -3) / 4, rel=1e-6)
    assert gradient == pytest.approx([1.3498588 / -2 / 4, 0.9048374 / 2 / 4, 0.0, 0.8187308 / 1.5 / 4], rel=1e-6)


def test_loss_args_are_keyword_arguments():
    loss, _, _ = run(config("ratio", loss_args={"scale": 3.0}))
    assert loss == pytest.approx(3 * sum(TERMS) / 4, rel=1e-6)


def test_episode_level_loss_gets_ratios_of_episodes():
    """Mean log u: -0.15, 0.25; mean log w: 0.1, -0.1."""
    loss, _, stats = run(config("episode_ratio"))
    first, second = 0.9512294, 1.1618342  # e^-0.05, e^0.15
    assert loss == pytest.approx((-first * 2 + first - second * 2 + second * 3) / 4, rel=1e-5)
    assert stats["clip_fraction"] == 0.5  # e^0.25 = 1.28 for the second episode


def test_episode_level_loss_needs_segments():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=rf"loss={HERE}:episode_ratio needs the episode of each token"):
        actor_loss(x, x, x, x, torch.ones(4, dtype=torch.bool), 1, config("episode_ratio"))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("mean", r"loss has shape \[\]: return a tensor of shape \[4\], one entry per token"),
        ("number", "loss has float: return a tensor"),
        ("bad_flags", r"clipped has shape \[\]: return"),
    ],
)
def test_loss_without_one_number_per_token_is_refused(function, problem):
    """Broadcasting a mean over the tokens would train another objective without a word."""
    with pytest.raises(ValueError, match=problem):
        run(config(function))


@pytest.mark.parametrize("loss", [*LOSS.builtin, f"{HERE}:ratio", f"{HERE}:episode_ratio"])
def test_good_losses_pass_the_trial(loss):
    arguments = {"top_k": 4} if loss == "distill" else {}
    fields = {"loss": loss, "loss_args": arguments, "aggregation": "sequence", "entropy_coef": 0.1}
    try_loss(PPOConfig.model_validate(fields))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("mean", "fails on a trial batch: ValueError: train.ppo.loss="),
        ("detached", "fails on a trial batch: ValueError: the result has no gradient"),
        ("asks_for_more", "fails on a trial batch: AttributeError: 'LossInputs' object has no attribute"),
        ("largest_ratio", "fails on an empty micro-batch: RuntimeError: max(): "),
        ("log_of_less_than_nothing", "loss or gradient is not finite on a trial batch"),
    ],
)
def test_broken_loss_fails_the_trial_in_one_line(function, problem):
    with pytest.raises(ConfigError) as caught:
        try_loss(config(function))
    text = str(caught.value)
    assert text.startswith(f"config: train.ppo.loss='{HERE}:{function}': {problem}") and "\n" not in text


# ---- Sampled tokens that are not trained, by reason, and the bias of the lengths that are


def row(ticket, tokens, episode=0):
    return SampleMeta(f"{ticket}.0/{episode}.0", ticket, 0, tokens, tokens, 0.0, False, 0, 0, 0, episode=episode)


def test_shares_are_of_trained_and_discarded_tokens():
    losses = TokenLosses()
    losses.lose("stale", [row("t1", 10)])
    losses.lose("success_rate", [row("t2", 20)])
    losses.train([row("t3", 40), row("t4", 30)], [row("t3", 40), row("t4", 10)])
    step = losses.close_step()
    assert step.tokens == 100 and step.untrained == {"masked": 0.2, "stale": 0.1, "success_rate": 0.2}
    assert step.too_old == pytest.approx(0.3) and step.warning
    assert losses.close_step().untrained == {}, "a step counts what ended since the one before"


def test_nothing_lost_means_no_distance():
    losses = TokenLosses()
    losses.train([row("t1", 10), row("t2", 99)], [row("t1", 10), row("t2", 99)])
    assert (losses.close_step().length_ks, losses.close_step().too_old) == (0.0, 0.0)


def test_starved_length_shows_as_distance():
    losses = TokenLosses()
    losses.train([row("t1", 10), row("t2", 20), row("t3", 30)], [row("t1", 10), row("t2", 20), row("t3", 30)])
    losses.lose("stale", [row("t4", 500)])
    losses.lose("copy", [row("t5", 500)])  # its ticket has another end
    assert losses.close_step().length_ks == pytest.approx(0.25)


def test_window_forgets_old_steps():
    losses = TokenLosses()
    losses.lose("stale", [row("t1", 10)])
    steps = [losses.close_step() for _ in range(WINDOW_STEPS + 1)]
    assert [step.too_old for step in steps] == [1.0] * WINDOW_STEPS + [0.0]


def test_distance_matches_worked_examples():
    assert ks_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert ks_distance([1, 2], [3, 4]) == 1.0
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert ks_distance([1, 1, 2], [1, 2, 2]) == pytest.approx(1 / 3)
    assert ks_distance([], [1]) == 0.0


@given(st.lists(st.integers(0, 20), min_size=1), st.lists(st.integers(0, 20), min_size=1))
def test_distance_is_largest_gap_of_distributions(a, b):
    gaps = [abs(np.mean(np.array(a) <= x) - np.mean(np.array(b) <= x)) for x in range(21)]
    assert ks_distance(a, b) == pytest.approx(max(gaps))

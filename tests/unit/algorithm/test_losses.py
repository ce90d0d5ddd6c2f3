"""The loss door: losses of the user with arguments, episode ratios and clip statistics; losses that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from realsys.algorithm.loss import actor_loss, finish_stats, try_loss
from realsys.algorithm.loss_tokens import Segments
from realsys.algorithm.losses import LossInputs, Surrogate, episode_level, load_loss
from realsys.config.doors import LOSS
from realsys.config.schema_train import PPOConfig
from realsys.errors import ConfigError

HERE = __name__
# log u = 0.2, -0.5, -0.5, 1.0 and log w = 0.3, -0.1, 0, -0.2
THETA = [-1.0, -2.0, -2.0, -0.5]
PROX = [-1.2, -1.5, -1.5, -1.5]
BEHAV = [-1.5, -1.4, -1.5, -1.3]
ADVANTAGES = [2.0, -1.0, 2.0, -3.0]


def ratio(inputs: LossInputs, scale: float = 1.0) -> Tensor:
    return -scale * inputs.u * inputs.advantages


@episode_level
def episode_ratio(inputs: LossInputs) -> Surrogate:
    return Surrogate(ratio(inputs), clipped=inputs.u > 1.2)


def mean(inputs: LossInputs) -> Tensor:
    return ratio(inputs).mean()


def number(inputs: LossInputs) -> float:
    return 0.5


def bad_flags(inputs: LossInputs) -> Surrogate:
    return Surrogate(ratio(inputs), clipped=torch.tensor(True))


def detached(inputs: LossInputs) -> Tensor:
    return ratio(inputs).detach()


def log_of_masked(inputs: LossInputs) -> Tensor:
    return (-inputs.theta).log() / inputs.advantages  # both are 0 at masked tokens


def log_of_less_than_nothing(inputs: LossInputs) -> Tensor:
    return (inputs.u - 1).log()


def largest_ratio(inputs: LossInputs) -> Tensor:
    return ratio(inputs) / inputs.u.max()  # of no token there is none


def asks_for_more(inputs: LossInputs) -> Tensor:
    return inputs.no_such_field  # type: ignore[attr-defined, no-any-return]


def config(function: str, **fields: object) -> PPOConfig:
    return PPOConfig.model_validate({"loss": f"{HERE}:{function}", **fields})


def run(cfg: PPOConfig, mask: Tensor | None = None) -> tuple[float, list[float], dict[str, float]]:
    mask = torch.ones(4, dtype=torch.bool) if mask is None else mask
    theta = torch.tensor(THETA, requires_grad=True)
    others = (torch.tensor(column) for column in (PROX, BEHAV, ADVANTAGES))
    rows = Segments(torch.tensor([2, 2]))
    loss, stats = actor_loss(theta, *others, mask, 4.0, cfg, loss=load_loss(cfg), segments=rows)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.tolist(), finish_stats({name: value.item() for name, value in stats.items()})


# -w * u * A: -e^0.5 * 2, e^-0.6, -e^-0.5 * 2, e^0.8 * 3
TERMS = [-3.2974425, 0.5488116, -1.2130613, 6.6766228]


def test_shared_code_weighs_and_averages_an_own_loss() -> None:
    loss, gradient, stats = run(config("ratio"))
    assert loss == pytest.approx(sum(TERMS) / 4, rel=1e-6)
    assert gradient == pytest.approx([term / 4 for term in TERMS], rel=1e-6)
    assert (stats["clip_fraction"], stats["dual_clip_fraction"], stats["tokens"]) == (0, 0, 4)


def test_cap_and_mask_apply_to_an_own_loss() -> None:
    cfg = config("ratio", behav_imp_weight_cap=1.2, behav_imp_weight_mode="truncate")
    loss, gradient, stats = run(cfg, torch.tensor([True, False, True, True]))
    first = -1.2 * 1.2214028 * 2  # w = e^0.3 is set to 1.2
    assert loss == pytest.approx((first + TERMS[2] + TERMS[3]) / 4, rel=1e-6)
    assert gradient[1] == 0.0 and stats["capped_fraction"] == pytest.approx(1 / 3)


def test_nan_at_masked_tokens_reaches_nothing() -> None:
    loss, gradient, _ = run(config("log_of_masked"), torch.tensor([True, True, False, True]))
    # w * log(-theta) / A, with the gradient w / (theta * A)
    assert loss == pytest.approx((0.0 - 0.9048374 * 0.6931472 + 0.8187308 * -0.6931472 / -3) / 4, rel=1e-6)
    assert gradient == pytest.approx([1.3498588 / -2 / 4, 0.9048374 / 2 / 4, 0.0, 0.8187308 / 1.5 / 4], rel=1e-6)


def test_loss_args_are_keyword_arguments() -> None:
    loss, _, _ = run(config("ratio", loss_args={"scale": 3.0}))
    assert loss == pytest.approx(3 * sum(TERMS) / 4, rel=1e-6)


def test_episode_level_loss_gets_ratios_of_episodes() -> None:
    """Mean log u: -0.15, 0.25; mean log w: 0.1, -0.1."""
    loss, _, stats = run(config("episode_ratio"))
    first, second = 0.9512294, 1.1618342  # e^-0.05, e^0.15
    assert loss == pytest.approx((-first * 2 + first - second * 2 + second * 3) / 4, rel=1e-5)
    assert stats["clip_fraction"] == 0.5  # e^0.25 = 1.28 for the second episode


def test_episode_level_loss_needs_segments() -> None:
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
def test_loss_without_one_number_per_token_is_refused(function: str, problem: str) -> None:
    """Broadcasting a mean over the tokens would train another objective without a word."""
    with pytest.raises(ValueError, match=problem):
        run(config(function))


@pytest.mark.parametrize("loss", [*LOSS.builtin, f"{HERE}:ratio", f"{HERE}:episode_ratio"])
def test_good_losses_pass_the_trial(loss: str) -> None:
    try_loss(PPOConfig.model_validate({"loss": loss, "aggregation": "sequence", "entropy_coef": 0.1}))


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
def test_broken_loss_fails_the_trial_in_one_line(function: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        try_loss(config(function))
    text = str(caught.value)
    assert text.startswith(f"config: train.ppo.loss='{HERE}:{function}': {problem}") and "\n" not in text

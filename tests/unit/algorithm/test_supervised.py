"""Objectives on demonstrations and pairs: values by hand, gradients, statistics, shares of a mean."""

import math

import pytest
import torch

from realsys.algorithm.loss import finish_stats, merge_stats
from realsys.algorithm.supervised import dpo_loss, reward_loss, sft_loss


def test_sft_loss_is_token_mean_negative_log_likelihood():
    theta = torch.tensor([-1.0, -3.0, math.nan], requires_grad=True)
    loss, stats = sft_loss(theta, torch.tensor([True, True, False]), 4.0)
    loss.backward()
    assert loss.item() == 1.0
    assert theta.grad is not None and theta.grad.tolist() == [-0.25, -0.25, 0.0]
    assert (stats["tokens"].item(), stats["loss_sum"].item()) == (2, 4)


LOGPROBS = torch.tensor([[-2.0, -3.0], [-4.0, -1.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-2.5, -2.0], [-4.0, -3.0]], dtype=torch.float64)  # log ratios 0.5, -1 and 0, 2
TOKENS = torch.tensor([[1, 2], [4, 2]])


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def finished(stats):
    return finish_stats({name: value.item() for name, value in stats.items()})


@pytest.mark.parametrize(
    ("arguments", "losses"),
    [
        ({"beta": 0.5}, [-log_sigmoid(0.75), -log_sigmoid(-1.0)]),
        (
            {"beta": 0.5, "label_smoothing": 0.1},
            [-0.9 * log_sigmoid(0.75) - 0.1 * log_sigmoid(-0.75), -0.9 * log_sigmoid(-1.0) - 0.1 * log_sigmoid(1.0)],
        ),
        ({"beta": 0.5, "loss_type": "hinge"}, [0.25, 2.0]),
        ({"beta": 0.5, "loss_type": "ipo"}, [0.0, 4.0]),  # (0.5 / 1 + 1 / 2 - 1)^2, (0 / 4 - 2 / 2 - 1)^2
    ],
)
def test_dpo_loss_is_mean_over_pairs(arguments, losses):
    loss, stats = dpo_loss(LOGPROBS, REFERENCE, TOKENS, 2.0, **arguments)
    assert loss.item() == pytest.approx(sum(losses) / 2, abs=1e-12)
    assert finished(stats) == pytest.approx(
        {
            "pairs": 2,
            "loss": sum(losses) / 2,
            "accuracy": 0.5,
            "margin_mean": (0.75 - 1.0) / 2,
            "chosen_reward_mean": 0.125,
            "rejected_reward_mean": 0.25,
            "chosen_logprob_mean": -3.0,
            "rejected_logprob_mean": -2.0,
        }
    )


def test_dpo_gradient_is_that_of_equation_seven():
    """beta sigma(-h), towards the chosen and away from the rejected response; none to the reference."""
    logprobs, reference = LOGPROBS.clone().requires_grad_(), REFERENCE.clone().requires_grad_()
    loss, _ = dpo_loss(logprobs, reference, TOKENS, 2.0, beta=0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    slopes = [0.25 * math.exp(log_sigmoid(-margin)) for margin in (0.75, -1.0)]
    assert logprobs.grad is not None and reference.grad is None
    assert logprobs.grad.tolist() == [pytest.approx([-slope, slope]) for slope in slopes]


def test_reward_loss_pulls_scores_apart_and_to_zero():
    scores = torch.tensor([[1.0, -0.5], [0.0, 2.0]], requires_grad=True)
    loss, stats = reward_loss(scores, 2.0, center=0.01)
    losses = [-log_sigmoid(1.5) + 0.01 * 0.25, -log_sigmoid(-2.0) + 0.01 * 4.0]
    assert loss.item() == pytest.approx(sum(losses) / 2)
    assert finished(stats) == pytest.approx(
        {
            "pairs": 2,
            "loss": sum(losses) / 2,
            "accuracy": 0.5,
            "margin_mean": -0.25,
            "chosen_score_mean": 0.5,
            "rejected_score_mean": 0.75,
        }
    )


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_shares_of_pairs_add_up(pairs):
    """A micro-batch may have no pair."""
    whole, stats = dpo_loss(LOGPROBS, REFERENCE, TOKENS, 2.0)
    parts = [
        dpo_loss(LOGPROBS[part], REFERENCE[part], TOKENS[part], 2.0) for part in (slice(pairs), slice(pairs, None))
    ]
    assert sum(share.item() for share, _ in parts) == pytest.approx(whole.item())
    assert finished(merge_stats(own for _, own in parts)) == pytest.approx(finished(stats))


@pytest.mark.parametrize("scores", [torch.zeros(2), torch.zeros(2, 3)])
def test_other_shapes_than_pairs_are_refused(scores):
    with pytest.raises(ValueError, match="must be"):
        reward_loss(scores, 1.0)

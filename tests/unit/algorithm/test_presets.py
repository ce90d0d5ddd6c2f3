"""Each shipped preset computes the objective of its paper, written out here answer by answer.

The policy that sampled is the one before the step (w = 1): what the papers assume.
"""

import pytest
import torch

from realsys.algorithm.advantages import (
    moments,
    normalise_tokens,
    outcome_advantages,
    outcome_rewards,
    token_advantages,
    token_rewards,
)
from realsys.algorithm.kl import kl_estimate
from realsys.algorithm.loss import actor_loss, loss_denominator
from realsys.algorithm.loss_tokens import Segments
from realsys.config.compose import compose
from realsys.config.dataflow import token_level_advantages
from tests.support.training.sample_records import make_ref

LIMIT = 50
REWARDS = [[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]]  # two prompts, three answers each
LENGTHS = [[3, 1, 4], [2, 5, 2]]
COUNT = sum(sum(group) for group in LENGTHS)


def make_logprobs():
    generator = torch.Generator().manual_seed(5)
    old = -2.5 - torch.rand(COUNT, generator=generator)
    theta = old + 0.4 * torch.randn(COUNT, generator=generator)
    theta[0] = old[0] + 2.0  # beyond every clip
    return theta, old, old + 0.3 * torch.randn(COUNT, generator=generator)


def answers(theta):
    _, old, reference = make_logprobs()
    found, start = [], 0
    for prompt, lengths in enumerate(LENGTHS):
        for k, length in enumerate(lengths):
            part = slice(start, start + length)
            found.append((theta[part], old[part], reference[part], prompt, k))
            start += length
    return found


def group_norm(prompt, k):
    rewards = REWARDS[prompt]
    mean = sum(rewards) / 3
    return (rewards[k] - mean) / (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5


def clipped(ratio, advantage, low, high):
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(theta):
    """DeepSeekMath, equation 3 with the KL of equation 4."""
    total = torch.zeros(())
    for new, old, reference, prompt, k in answers(theta):
        kl = (reference - new).exp() - (reference - new) - 1
        total = total + (clipped((new - old).exp(), group_norm(prompt, k), 0.2, 0.2) - 0.04 * kl).mean()
    return -total / 6


def dapo(theta):
    """DAPO, equation 8, with the tokens of the batch below the line."""
    parts = [clipped((new - old).exp(), group_norm(p, k), 0.2, 0.28) for new, old, _, p, k in answers(theta)]
    return -torch.cat(parts).mean()


def dr_grpo(theta):
    """Dr.GRPO: sums over tokens, a constant below the line."""
    total = torch.zeros(())
    for new, old, _, prompt, k in answers(theta):
        advantage = REWARDS[prompt][k] - sum(REWARDS[prompt]) / 3
        total = total + clipped((new - old).exp(), advantage, 0.2, 0.2).sum() / LIMIT
    return -total / 6


def rloo(theta):
    """RLOO: the log-prob of the answer times its reward less the others' mean; over a constant, too."""
    total = torch.zeros(())
    for new, _, _, prompt, k in answers(theta):
        others = [r for j, r in enumerate(REWARDS[prompt]) if j != k]
        total = total + (REWARDS[prompt][k] - sum(others) / 2) * new.sum() / LIMIT
    return -total / 6


def gspo(theta):
    """GSPO, equations 5 and 7."""
    parts = [clipped((new - old).mean().exp(), group_norm(p, k), 3e-4, 4e-4) for new, old, _, p, k in answers(theta)]
    return -torch.stack(parts).mean()


def cispo(theta):
    """MiniMax-M1, equations 4 and 5, without a lower bound."""
    parts = [(new - old).exp().clamp(max=5).detach() * group_norm(p, k) * new for new, old, _, p, k in answers(theta)]
    return -torch.cat(parts).mean()


def reinforce_plus_plus(theta):
    """REINFORCE++: reward at the end, k1 at each token, summed from the token on, normalised over the batch."""
    to_go = []
    for _, old, reference, prompt, k in answers(theta):
        paid = -0.001 * (old - reference)
        paid[-1] += REWARDS[prompt][k]
        to_go.append(torch.stack([paid[t:].sum() for t in range(len(paid))]))
    flat = torch.cat(to_go)
    advantages = (flat - flat.mean()) / flat.std(correction=0)
    return -clipped((theta - make_logprobs()[1]).exp(), advantages, 0.2, 0.2).mean()


def decoupled_ppo(theta):
    """AReaL: the answer's reward on every token, normalised over the batch."""
    rewards = torch.cat([torch.full((len(new),), REWARDS[p][k]) for new, _, _, p, k in answers(theta)])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    return -clipped((theta - make_logprobs()[1]).exp(), advantages, 0.2, 0.2).mean()


def distill(theta):
    """GKD, on-policy with the reverse KL: each sampled token earns log p_teacher - log p_student."""
    parts = [clipped((new - old).exp(), reference - old, 0.2, 0.2) for new, old, reference, _, _ in answers(theta)]
    return -torch.cat(parts).mean()


def of_preset(config, theta):
    """As the train calls do it, in one micro-batch."""
    ppo = config.train.ppo
    _, old, reference = make_logprobs()
    refs = [make_ref(f"{p}/{k}", 4 + LENGTHS[p][k], 4, REWARDS[p][k], False, p) for p in range(2) for k in range(3)]
    lengths = [ref.loss_tokens for ref in refs]
    if token_level_advantages(config):
        kl = kl_estimate(old, reference, ppo.kl.estimator).numpy()
        rewards = token_rewards(outcome_rewards(refs, ppo, LIMIT), lengths, kl, ppo.kl.coef)
        found, _ = token_advantages(rewards, lengths, [False] * 6, ppo)
        advantages = torch.from_numpy(normalise_tokens(found, moments(found), ppo.advantage))
    else:
        advantages = torch.from_numpy(outcome_advantages(refs, ppo, LIMIT)).repeat_interleave(torch.tensor(lengths))
    in_loss = ppo.kl.coef > 0 and ppo.kl.place == "loss"
    loss, _ = actor_loss(
        theta,
        old,
        old,
        advantages,
        torch.ones(COUNT, dtype=torch.bool),
        loss_denominator(refs, ppo, LIMIT),
        ppo,
        segments=Segments(torch.tensor(lengths)),
        ref=reference if in_loss else None,
        kl_coef=ppo.kl.coef if in_loss else 0.0,
    )
    return loss


@pytest.mark.parametrize("paper", [grpo, dapo, dr_grpo, rloo, gspo, cispo, reinforce_plus_plus, decoupled_ppo, distill])
def test_preset_is_the_objective_of_its_paper(paper):
    config = compose(["experiment=math", f"algorithm={paper.__name__}"])
    mine, theirs = (make_logprobs()[0].requires_grad_() for _ in range(2))
    found, expected = of_preset(config, mine), paper(theirs)
    found.backward()
    expected.backward()
    assert mine.grad is not None and theirs.grad is not None
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)
    assert mine.grad.abs().max() > 1e-4

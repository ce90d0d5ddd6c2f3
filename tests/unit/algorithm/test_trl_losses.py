"""Our objectives give the losses of TRL's trainers, on 1,000 random batches (``tests.support.training.trl_losses``)."""

import json

import numpy as np
import torch

from realsys.algorithm.loss import Stats, finish_stats
from realsys.algorithm.supervised import dpo_loss, reward_loss, sft_loss
from tests.support.training.trl_losses import COLUMNS, FILE, SEEDS, Batch


def by_pair(values):
    """[2n], the chosen responses first -> [n, 2]"""
    return torch.from_numpy(values).view(2, -1).T


def finished(stats: Stats):
    return finish_stats({name: value.item() for name, value in stats.items()})


def ours(batch):
    mask = batch.mask[:, 1:]
    sums = [by_pair((values * mask).sum(1)) for values in (batch.policy, batch.reference)]
    tokens, arguments = by_pair(mask.sum(1)), {"beta": batch.beta}

    def dpo(**more):
        loss, stats = dpo_loss(*sums, tokens, float(batch.pairs), **arguments, **more)
        return loss.item(), finished(stats)

    def reward(center=0.0):
        loss, stats = reward_loss(by_pair(batch.scores), float(batch.pairs), center=center)
        return loss.item(), finished(stats)

    sft, _ = sft_loss(torch.from_numpy(batch.policy[mask]), torch.ones(mask.sum(), dtype=torch.bool), mask.sum())
    (sigmoid, stats), (plain, reward_stats) = dpo(), reward()
    return [
        sft.item(),
        sigmoid,
        dpo(label_smoothing=batch.smoothing)[0],
        dpo(loss_type="hinge")[0],
        dpo(loss_type="ipo")[0],
        stats["accuracy"],
        stats["margin_mean"],
        plain,
        reward(batch.center)[0],
        reward_stats["accuracy"],
        reward_stats["margin_mean"],
    ]


def test_losses_and_statistics_are_those_of_trl():
    stored = json.loads(FILE.read_text())
    assert tuple(stored["columns"]) == COLUMNS and len(stored["rows"]) == SEEDS
    found, expected = np.array([ours(Batch(seed)) for seed in range(SEEDS)]), np.array(stored["rows"])
    # Relative above 1: ``sft_loss`` adds up in float32, as it does on the ranks.
    errors = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    differences = dict(zip(COLUMNS, errors.max(0).tolist(), strict=True))
    assert max(differences.values()) < 1e-6, differences

"""Clipped token ratio (PPO, 1707.06347), with an optional dual clip (1912.09729)."""

from __future__ import annotations

import torch

from realsys.algorithm.losses.contract import LossInputs, Surrogate


def ppo(inputs: LossInputs) -> Surrogate:
    """Compute ``-min(u * A, clip(u) * A)``; if ``cfg.c_clip`` is set, at most ``-c_clip * A`` for A < 0."""
    surrogate, c_clip = clipped_ratio(inputs), inputs.cfg.c_clip
    if c_clip == 0:
        return surrogate
    # For A >= 0 the surrogate is never positive, so only tokens with A < 0 can reach the bound.
    bound = c_clip * inputs.advantages.abs()
    bounded = torch.minimum(surrogate.loss, bound)
    return Surrogate(bounded, surrogate.clipped, surrogate.loss.detach() > bound)


def clipped_ratio(inputs: LossInputs) -> Surrogate:
    """Compute ``-min(u * A, clip(u) * A)``."""
    loose = -inputs.u * inputs.advantages
    tight = -inputs.clipped_u * inputs.advantages
    return Surrogate(torch.maximum(loose, tight), clipped=tight.detach() > loose.detach())

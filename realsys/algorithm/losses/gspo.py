"""Clipped sequence ratio (Zheng et al., 2507.18071)."""

from __future__ import annotations

from realsys.algorithm.losses.contract import LossInputs, Surrogate, episode_level
from realsys.algorithm.losses.ppo import clipped_ratio


@episode_level
def gspo(inputs: LossInputs) -> Surrogate:
    """Compute ``-min(u * A, clip(u) * A)`` with the u of the episode."""
    return clipped_ratio(inputs)

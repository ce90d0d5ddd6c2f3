"""Clipped weight (MiniMax-M1, 2506.13585)."""

from __future__ import annotations

from realsys.algorithm.losses.contract import LossInputs, Surrogate


def cispo(inputs: LossInputs) -> Surrogate:
    """Compute ``-sg(clip(u)) * A * theta``: every token keeps its gradient, weighted with the clipped u."""
    bounded = inputs.clipped_u
    loss = -bounded.detach() * inputs.advantages * inputs.theta
    return Surrogate(loss, clipped=(bounded != inputs.u).detach())

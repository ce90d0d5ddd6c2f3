"""No ratio (Williams, 1992; RLOO, 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from realsys.algorithm.losses.contract import LossInputs


def reinforce(inputs: LossInputs) -> Tensor:
    """Compute ``-A * theta``."""
    return -inputs.advantages * inputs.theta

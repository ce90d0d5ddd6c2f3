"""The loss of the tutorial: train.ppo.loss=loss:good_only"""

from realsys.algorithm.losses import LossInputs, Surrogate


def good_only(inputs: LossInputs, cap: float = 1.2) -> Surrogate:
    """``-min(u, cap) * max(A, 0)``: learn from completions that are better than the others of their group."""
    good = inputs.advantages.clamp(min=0)
    return Surrogate(-inputs.u.clamp(max=cap) * good, clipped=(inputs.u > cap) & (good > 0))

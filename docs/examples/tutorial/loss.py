"""The loss of the tutorial: train.ppo.loss=loss:capped"""

from realsys.algorithm.losses import LossInputs, Surrogate


def capped(inputs: LossInputs, cap: float = 1.2) -> Surrogate:
    """``-min(u, cap) * A``: a token that has become ``cap`` times as probable gets no further gradient."""
    return Surrogate(-inputs.u.clamp(max=cap) * inputs.advantages, clipped=inputs.u > cap)

"""A custom loss: Simple Policy Optimization (Xie et al., 2401.16025), a penalty instead of a clip.

    PYTHONPATH=docs/examples realsys run experiment=arith \
        train.ppo.loss=loss:spo train.ppo.loss_args.eps=0.3
"""

from torch import Tensor

from realsys.algorithm.losses import LossInputs, Surrogate, episode_level


def spo(inputs: LossInputs, eps: float = 0.2) -> Tensor:
    """``-(u * A - |A| / (2 * eps) * (u - 1)^2)``, smallest at u = 1 + eps (A > 0) or 1 - eps."""
    penalty = inputs.advantages.abs() / (2 * eps) * (inputs.u - 1) ** 2
    return penalty - inputs.u * inputs.advantages


@episode_level  # u and w are those of the whole episode, as in GSPO
def episode_spo(inputs: LossInputs, eps: float = 0.01) -> Surrogate:
    """The same with the ratio of the episode. ``clip_fraction`` reports tokens beyond eps."""
    beyond = (inputs.u - 1).detach().abs() > eps
    return Surrogate(spo(inputs, eps), clipped=beyond)

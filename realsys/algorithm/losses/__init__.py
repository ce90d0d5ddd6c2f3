"""Policy losses. ``train.ppo.loss`` names one of these, or ``package.module:function``.

    contract.py   the contract, and how to write one
    ppo.py        clipped token ratio
    gspo.py       clipped sequence ratio
    cispo.py      clipped weight
    reinforce.py  no ratio
    distill.py    divergence to a teacher

``realsys.algorithm.loss`` contains the part that all losses share.
"""

from __future__ import annotations

from realsys.algorithm.losses.contract import ConfiguredLoss, Loss, LossInputs, Surrogate, episode_level
from realsys.config.doors import LOSS
from realsys.config.schema_train import PPOConfig

__all__ = ["ConfiguredLoss", "Loss", "LossInputs", "Surrogate", "episode_level", "load_loss"]


def load_loss(cfg: PPOConfig) -> ConfiguredLoss:
    """Import the loss that ``cfg`` names. Raises ConfigError."""
    return ConfiguredLoss(cfg.loss, LOSS.load(cfg.loss), dict(cfg.loss_args))

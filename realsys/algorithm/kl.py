"""KL divergence from the reference model: estimators per token, and the controller of the coefficient.

Importing this needs no torch: the master steers the coefficient, and its process has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

#: Bound on |log ratio| before exp: float32 overflows at 88, and an infinite ratio times the zero gradient of its
#: clipped branch is NaN. Nothing that still trains is anywhere near e^20.
MAX_LOG_RATIO = 20.0

#: Largest relative error the controller answers to (Ziegler et al.)
MAX_ERROR = 0.2


def kl_estimate(policy: Tensor, ref: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per token an estimate of KL(policy || ref) from a token sampled by the policy (Schulman, 2020). [t] -> [t]

        k1  log(policy / ref)                       unbiased, can be negative
        k2  log(policy / ref)^2 / 2                 biased, never negative
        k3  ref / policy - 1 - log(ref / policy)    unbiased, never negative

    Differentiable in ``policy``; what the gradient of each estimates is another question (docs/algorithms.md).
    """
    log_ratio = ref - policy
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


class AdaptiveKL:
    """Coefficient of the KL penalty, steered in proportion to the error (Ziegler et al., arXiv 1909.08593).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * answers / horizon
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self._target, self._horizon = target, horizon

    def update(self, kl: float, answers: int) -> None:
        """After a train step on ``answers`` answers, which measured ``kl`` per answer token, on average over all ranks.

        A step that measured nothing (``kl`` is NaN: all its updates were skipped) changes nothing.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1.0, -MAX_ERROR), MAX_ERROR)
        # A batch beyond the horizon counts as one of the horizon: otherwise the coefficient could become negative.
        self.coef *= 1.0 + error * min(1.0, answers / self._horizon)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Raises KeyError."""
        self.coef = state["coef"]

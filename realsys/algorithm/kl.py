"""KL divergence from the reference model: estimators per token, and the controller of the coefficient.

Importing this module needs no torch: the master controls the coefficient, and its process has no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

#: Bound on |log ratio| before exp. float32 overflows at 88, and an infinite ratio times the zero gradient of its
#: clipped branch is NaN. A policy that still trains has no ratio near e^20.
MAX_LOG_RATIO = 20.0

#: Bound on k3, which grows like e^|log ratio|: without it one token whose probability has collapsed outweighs a batch.
#: A token beyond it adds the bound and no gradient.
MAX_K3 = 10.0

#: Largest relative error that the controller reacts to (Ziegler et al.)
MAX_ERROR = 0.2


def kl_estimate(policy: Tensor, ref: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy || ref) per token, from tokens sampled by the policy (Schulman, 2020). [t] -> [t]

        k1  log(policy / ref)                       unbiased, can be negative
        k2  log(policy / ref)^2 / 2                 biased, never negative
        k3  ref / policy - 1 - log(ref / policy)    unbiased, never negative; at most MAX_K3

    Differentiable in ``policy``; docs/algorithms.md explains the gradient of each.
    """
    log_ratio = ref - policy
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).clamp(max=MAX_K3)


class AdaptiveKL:
    """Coefficient of the KL penalty, adapted in proportion to the error (Ziegler et al., arXiv 1909.08593).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * completions / horizon
    """

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, completions: int) -> None:
        """Adapt the coefficient after a train step on ``completions`` completions.

        ``kl`` is the mean per loss token over all ranks. NaN (all updates of the step were skipped)
        changes nothing.
        """
        if not math.isfinite(kl):
            return
        error = min(max(kl / self._target - 1.0, -MAX_ERROR), MAX_ERROR)
        # A batch larger than the horizon counts as the horizon: the coefficient could become negative.
        self.coef *= 1.0 + error * min(1.0, completions / self._horizon)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient. Raises KeyError if ``state`` has none."""
        self.coef = state["coef"]

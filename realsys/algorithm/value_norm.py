"""Running mean and std of returns, which normalise the targets of a critic. Plain numpy, float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from realsys.config.sections.schema_train import CriticConfig
from realsys.types import F32

#: Lower bound of the variance: after a first batch of equal returns, the next differences would be infinite.
MIN_VARIANCE = 1e-5


class RunningMoments:
    """Mean and std of the returns so far (Yu et al., arXiv 2103.01955; the statistics of PopArt, 1602.07714).

        none         mean 0, std 1: the critic predicts the returns themselves
        moving       over all returns so far, all with the same weight
        exponential  over batch means, the newest with the largest weight: m = beta*m + (1-beta)*batch,
                     divided by 1 - beta^k

    Each kind is one weight with two weighted sums; dividing by the weight corrects the bias of the start.
    Before the first update, normalising is the identity. Unlike PopArt, the critic's output layer is not
    rescaled when the statistics change: its predictions shift, and it learns the difference.
    """

    def __init__(self, cfg: CriticConfig) -> None:
        self._kind = cfg.value_norm
        self._beta = cfg.value_norm_beta
        self._weight = 0.0
        self._total = 0.0
        self._total_of_squares = 0.0

    @property
    def mean(self) -> float:
        return self._total / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        return math.sqrt(max(self._total_of_squares / self._weight - self.mean**2, MIN_VARIANCE))

    def update(self, count: float, total: float, total_of_squares: float) -> None:
        """Add the returns of a batch: their number, sum and sum of squares over all ranks."""
        if self._kind == "none" or count == 0:
            return
        keep, weight = 1.0, 1.0
        if self._kind == "exponential":
            keep, weight = self._beta, (1.0 - self._beta) / count
        self._weight = keep * self._weight + weight * count
        self._total = keep * self._total + weight * total
        self._total_of_squares = keep * self._total_of_squares + weight * total_of_squares

    def normalise(self, returns: npt.ArrayLike) -> F32:
        """Convert returns to targets of the critic, float32 of the same shape."""
        return ((np.asarray(returns, np.float64) - self.mean) / self.std).astype(np.float32)

    def denormalise(self, predictions: npt.ArrayLike) -> F32:
        """Convert predictions of the critic to values in units of the reward, float32 of the same shape."""
        return (np.asarray(predictions, np.float64) * self.std + self.mean).astype(np.float32)

    def state_dict(self) -> dict[str, float]:
        return {"weight": self._weight, "total": self._total, "total_of_squares": self._total_of_squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the statistics. Raises KeyError if ``state`` lacks an entry."""
        self._weight = state["weight"]
        self._total = state["total"]
        self._total_of_squares = state["total_of_squares"]

"""Least squares with numbers that cannot be negative, and errors from blocks of time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

Matrix = Any
BLOCKS = 8  # neighbours are alike, so whole blocks are drawn
DRAWS = 30


def non_negative(columns: Matrix, target: Matrix) -> Matrix:
    """Return the factors of ``columns`` [n, k] with the least squared error at ``target`` [n]; none is negative.

    The column with the most negative factor leaves until none is left, which is exact for two columns.
    """
    kept = list(range(columns.shape[1]))
    factors = np.zeros(columns.shape[1])
    while kept:
        solution = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
        if (solution >= 0).all():
            factors[kept] = solution
            break
        kept.pop(int(np.argmin(solution)))
    return factors


def errors_of(count: int, estimate: Callable[[Matrix], Matrix], seed: int = 1) -> tuple[Matrix, Matrix]:
    """Return the estimate from all ``count`` observations, and its standard error from redrawn blocks.

    ``estimate`` gets the indexes of the observations to use.
    """
    blocks = np.array_split(np.arange(count), min(BLOCKS, count))
    random = Random(seed)
    drawn = [estimate(np.concatenate(random.choices(blocks, k=len(blocks)))) for _ in range(DRAWS)]
    return estimate(np.arange(count)), np.std(np.array(drawn), axis=0)

"""Least squares with numbers that cannot be negative, and errors from blocks of time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import Any

import numpy as np

Matrix = Any
BLOCKS = 8  # neighbours are alike, so whole blocks are drawn
DRAWS = 30
_EQUAL = 1e-9  # relative difference of squared errors that rounding makes


def non_negative(columns: Matrix, target: Matrix) -> Matrix:
    """Return the factors of ``columns`` [n, k] with the least squared error at ``target`` [n]; none is negative.

    All subsets of the columns are tried, so the result is exact and does not depend on units. ``k`` must be small. If
    several subsets explain ``target`` equally well, the one with the fewest columns is taken, then the earliest one.
    """
    count = columns.shape[1]
    sizes = np.sqrt(np.square(columns).sum(axis=0))
    scaled = columns / np.maximum(sizes, 1e-300)
    products, projections = scaled.T @ scaled, scaled.T @ target
    best, factors = 0.0, np.zeros(count)
    for chosen in (list(kept) for size in range(1, count + 1) for kept in combinations(range(count), size)):
        solution = np.linalg.lstsq(products[np.ix_(chosen, chosen)], projections[chosen], rcond=1e-10)[0]
        explained = float(projections[chosen] @ solution)  # squared target minus squared error
        if (solution >= 0).all() and explained > best * (1.0 + _EQUAL):
            best, factors = explained, np.zeros(count)
            factors[chosen] = solution
    return factors / np.maximum(sizes, 1e-300)


def redrawn(count: int, random: Random) -> Matrix:
    """Return indexes of ``count`` observations as another record might have them: whole blocks, drawn with return."""
    blocks = np.array_split(np.arange(count), min(BLOCKS, count))
    return np.concatenate(random.choices(blocks, k=len(blocks)))


def errors_of(count: int, estimate: Callable[[Matrix], Matrix], seed: int = 1) -> tuple[Matrix, Matrix]:
    """Return the estimate from all ``count`` observations, and its standard error from redrawn blocks.

    ``estimate`` gets the indexes of the observations to use.
    """
    random = Random(seed)
    drawn = [estimate(redrawn(count, random)) for _ in range(DRAWS)]
    return estimate(np.arange(count)), np.std(np.array(drawn), axis=0)

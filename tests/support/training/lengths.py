"""Lengths of sequences, in tokens: what packing, balancing and memory are tried on."""

import numpy as np
import numpy.typing as npt

LIMIT = 14_336  # tokens of prompt and completion together
PROMPT = 8  # tokens of a prompt where lengths are small
Array = npt.NDArray[np.int64]


def heavy(rng: np.random.Generator, n: int) -> Array:
    """Draw from a clipped Pareto tail: most are short, a few reach the limit."""
    return np.clip((300 * (1 + rng.pareto(1.1, n))).astype(np.int64), 1, LIMIT)


def lognormal(rng: np.random.Generator, n: int) -> Array:
    """Draw from a milder tail."""
    return np.clip(rng.lognormal(7.5, 1.0, n).astype(np.int64), 1, LIMIT)


def uniform(rng: np.random.Generator, n: int) -> Array:
    """Draw without a tail."""
    return rng.integers(1, LIMIT + 1, n)


def bimodal(rng: np.random.Generator, n: int) -> Array:
    """Draw lengths that no packer fits to the bound: three in ten exceed half a micro-batch."""
    return np.where(rng.random(n) < 0.3, rng.integers(17_000, 28_672, n), rng.integers(100, 2_000, n))


def heavy_lengths(n: int, limit: int, seed: int) -> Array:
    """Draw from a Pareto tail of exponent 1.1 from limit/48 on, clipped at ``limit``; longer than a prompt."""
    rng = np.random.default_rng(seed)
    return np.clip((limit / 48 * (1 + rng.pareto(1.1, n))).astype(np.int64), PROMPT + 1, limit)

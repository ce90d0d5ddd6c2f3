"""Packers of micro-batches, two ways without packing, and the figures by which the default is chosen."""

import statistics
import time

import numpy as np
import numpy.typing as npt

from realsys.algorithm.microbatch import Lengths, Packer, balanced, fewest_sequences, first_fit

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


CAPACITY = 32_768  # tokens of a micro-batch


def lower_bound(lengths: Lengths, capacity: int, k_min: int = 1) -> int:
    """Return a lower bound of the number of micro-batches: ``ceil(sum / capacity)``, at least ``k_min``.

    With fewer than ``k_min`` sequences, their number takes its place.
    """
    return max(-(-int(np.sum(lengths)) // capacity), min(k_min, len(lengths)))


def fixed(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Put a fixed number of sequences in each micro-batch, safe for the longest ones."""
    per_batch = max(1, capacity // int(np.max(lengths)))
    return [list(range(i, min(i + per_batch, len(lengths)))) for i in range(0, len(lengths), per_batch)]


def same_count(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Split into equal counts, as many parts as first fit makes; their tokens may exceed ``capacity``."""
    count = len(first_fit(lengths, capacity, k_min))
    return [part.tolist() for part in np.array_split(np.arange(len(lengths)), count)]


PACKERS: dict[str, Packer] = {
    "fixed": fixed,
    "same_count": same_count,
    "fewest_sequences": fewest_sequences,
    "first_fit": first_fit,
    "balanced": balanced,
}


def measure(packer: Packer, batches: list[Array], repeat: int) -> dict[str, float]:
    """Return the mean figures of ``packer`` over several batches of lengths; benchmarks/microbatch.py explains them."""
    rows = []
    for lengths in batches:
        seconds = []
        for _ in range(repeat):
            started = time.perf_counter()
            packed = packer(lengths, CAPACITY)
            seconds.append(time.perf_counter() - started)
        tokens = np.array([lengths[batch].sum() for batch in packed])
        rectangles = sum(len(batch) * int(lengths[batch].max()) for batch in packed)
        rows.append(
            (
                len(packed),
                100 * (len(packed) / lower_bound(lengths, CAPACITY) - 1),
                tokens.max() / tokens.mean(),
                tokens.max() / CAPACITY,
                100 * (1 - tokens.sum() / (len(packed) * CAPACITY)),
                100 * (1 - tokens.sum() / rectangles),
                1e3 * statistics.median(seconds),
            )
        )
    columns = ("batches", "over_bound_%", "max/mean", "peak", "unused_%", "padding_%", "ms")
    return {name: round(float(value), 3) for name, value in zip(columns, np.mean(rows, axis=0), strict=True)}

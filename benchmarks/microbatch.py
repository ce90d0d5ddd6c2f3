"""Dynamic micro-batching against fixed-count micro-batches and the lower bound, and the time it takes.

    python -m benchmarks.microbatch [--repeat 5] [--quick]

Lengths: `heavy` is a clipped Pareto tail (most answers short, a few at the limit), `lognormal` a milder one, `uniform`
the case without a tail, `bimodal` one that no packer can fit to the bound (three in ten exceed half a micro-batch).
Sizes: one rank's share of a minibatch (64, 512) and a stress case (100,000). Per packer:

    batches    micro-batches a step runs             over_bound  by how much that exceeds ceil(sum / capacity), in %
    max/mean   tokens of the largest against mean    peak        of the largest against the capacity; above 1: no memory
    unused     of capacity, over all, in %           padding     if each were a rectangle as wide as its longest, in %
    ms         median time of one call

Two ways without packing, both in order of arrival: `fixed` takes as many sequences per micro-batch as are safe
at the limit's length; `same_count` as many micro-batches as first fit, with equally many sequences each, and hopes.
Rows are means over `draws` batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._table import report
from realsys.buffer.microbatch import Lengths, Packer, balanced, fewest_sequences, first_fit, lower_bound, pack

CAPACITY = 32_768
LIMIT = 14_336  # prompt and answer of one sequence
Array = npt.NDArray[np.int64]


def heavy(rng: np.random.Generator, n: int) -> Array:
    return np.clip((300 * (1 + rng.pareto(1.1, n))).astype(np.int64), 1, LIMIT)


def lognormal(rng: np.random.Generator, n: int) -> Array:
    return np.clip(rng.lognormal(7.5, 1.0, n).astype(np.int64), 1, LIMIT)


def uniform(rng: np.random.Generator, n: int) -> Array:
    return rng.integers(1, LIMIT + 1, n)


def bimodal(rng: np.random.Generator, n: int) -> Array:
    return np.where(rng.random(n) < 0.3, rng.integers(17_000, 28_672, n), rng.integers(100, 2_000, n))


def fixed(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """A fixed number of sequences per micro-batch, safe for the longest possible ones."""
    per_batch = max(1, capacity // int(np.max(lengths)))
    return [list(range(i, min(i + per_batch, len(lengths)))) for i in range(0, len(lengths), per_batch)]


def same_count(lengths: Lengths, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Equally many sequences in each of as few micro-batches as first fit has; their tokens may exceed the capacity."""
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
    """Mean figures of ``packer`` over several batches of lengths."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="calls per batch of lengths; their median is the time")
    parser.add_argument("--quick", action="store_true", help="few draws and 10,000 in the stress case")
    options = parser.parse_args()
    makers: list[Callable[[np.random.Generator, int], Array]] = [heavy, lognormal, uniform, bimodal]
    stress = 10_000 if options.quick else 100_000
    rows: list[dict[str, Any]] = []
    for n, draws in ((64, 50), (512, 20), (stress, 1)):
        for make in makers:
            rng = np.random.default_rng(1)
            batches = [make(rng, n) for _ in range(min(draws, 5) if options.quick else draws)]
            for name, packer in PACKERS.items():
                label = f"{name} (default)" if packer is pack else name
                row = {"sequences": n, "lengths": make.__name__, "packer": label, "draws": len(batches)}
                rows.append(row | measure(packer, batches, options.repeat))
    report("microbatch", rows, {"capacity": CAPACITY, "repeat": options.repeat, "seed": 1})


if __name__ == "__main__":
    main()

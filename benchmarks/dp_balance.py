"""Balance of one minibatch's work over data-parallel ranks.

    python -m benchmarks.dp_balance [--draws 10]

Work is the FLOPs of training, ``a*s + b*s^2`` for a sequence of s tokens, of a Qwen2 1.5B. The slowest rank sets the
time of a minibatch, so a figure of 1.5 means that the ranks wait a third of it. Each is max / mean over ranks:

    round_robin  in order of arrival, one after the other
    equal_count  longest first in serpentines, so that every rank has equally many sequences
    tokens       train.balance=tokens: equal tokens
    flops        train.balance=flops: equal FLOPs by the cost model (the default)
    bound        no split is more even: the longest sequence lies somewhere whole

``flops_ms`` is the time that the last split takes. Lengths as in benchmarks/microbatch.py; means over ``draws``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._table import report
from realsys.algorithm.balance import flop_costs, heaviest_sum, lower_bound_of_sum, split_balanced, training_flops
from realsys.model_files.architecture import ModelSizes
from tests.support.training.packers import LIMIT, Array, bimodal, heavy

QWEN2_1_5B = ModelSizes(hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, ffn=8960, outputs=151_936)
RANKS = (2, 4, 8, 16, 32, 64)
Split = list[list[int]]


def round_robin(lengths: Array, ranks: int) -> Split:
    return [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]


def equal_count(lengths: Array, ranks: int) -> Split:
    """Longest first to ranks 0, 1, ..., n, n, ..., 1, 0 and so on."""
    order = np.argsort(-lengths, kind="stable")
    place = np.arange(len(lengths)) % (2 * ranks)
    owner = np.minimum(place, 2 * ranks - 1 - place)
    return [order[owner == rank].tolist() for rank in range(ranks)]


def measure(batches: list[Array], ranks: int) -> dict[str, float]:
    """Mean of max / mean FLOPs per way of splitting."""
    rows = []
    for lengths in batches:
        costs: npt.NDArray[np.float64] = flop_costs(lengths, *training_flops(QWEN2_1_5B))
        started = time.perf_counter()
        by_flops = split_balanced(costs, ranks)
        seconds = time.perf_counter() - started
        splits = [
            round_robin(lengths, ranks),
            equal_count(lengths, ranks),
            split_balanced(lengths, ranks),
            by_flops,
        ]
        heaviest = [heaviest_sum(split, costs) for split in splits] + [lower_bound_of_sum(costs, ranks)]
        rows.append([*(value / (costs.sum() / ranks) for value in heaviest), 1e3 * seconds])
    columns = ("round_robin", "equal_count", "tokens", "flops", "bound", "flops_ms")
    return {name: round(float(value), 4) for name, value in zip(columns, np.mean(rows, axis=0), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="batches of lengths per row")
    options = parser.parse_args()
    cases: list[tuple[Callable[[np.random.Generator, int], Array], int]] = [
        (heavy, 256),
        (heavy, 2048),
        (bimodal, 2048),
    ]
    rows: list[dict[str, Any]] = []
    for make, n in cases:
        rng = np.random.default_rng(1)
        batches = [make(rng, n) for _ in range(options.draws)]
        for ranks in RANKS:
            rows.append({"lengths": make.__name__, "sequences": n, "ranks": ranks} | measure(batches, ranks))
    report("dp_balance", rows, {"model": "qwen2-1.5b", "limit": LIMIT, "draws": options.draws, "seed": 1})


if __name__ == "__main__":
    main()

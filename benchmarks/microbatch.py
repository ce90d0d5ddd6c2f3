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
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._table import report
from realsys.algorithm.microbatch import pack
from tests.support.training.packers import CAPACITY, PACKERS, Array, bimodal, heavy, lognormal, measure, uniform


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

"""One epoch of a mixture: which rows of which source, and how often.

    source   rows  weight      copies in an epoch
    a         100    1      -> 100 x 1                 the source with the most rows per weight occurs once
    b          30    1      -> 30 x 3 + 10             the others are repeated; 10 are chosen by the seed

The shares are those of the weights, to one row. An epoch has every row at least once, so no prompt is never trained.
The order of an epoch is not decided here: the ledger shuffles the positions of a mixture like those of any other data
(``realsys.manager.ledger.prompt_order``). The result depends on rows, weights and seed alone, so a cursor into it
stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from realsys.errors import DataError

MAX_EPOCH = 20_000_000  # positions; each takes 16 bytes in every process that reads prompts


def copies(rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of positions of each source in an epoch. Raises DataError if an epoch would be too long."""
    if not all(rows):
        raise DataError("data.mixture: a source has no rows to train on: remove it")
    scale = max(count / weight for count, weight in zip(rows, weights, strict=True))
    shares = [max(count, round(scale * weight)) for count, weight in zip(rows, weights, strict=True)]
    if sum(shares) > MAX_EPOCH:
        largest = max(range(len(rows)), key=lambda i: rows[i] / weights[i])
        problem = (
            f"an epoch would have {sum(shares):,} prompts, because each of the {rows[largest]:,} rows of source "
            f"{largest + 1} with weight {weights[largest]:g} occurs in it: increase that weight, or cut the source"
        )
        raise DataError(f"data.mixture: {problem}")
    return shares


def epoch(sources: Sequence[npt.NDArray[np.int64]], weights: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    """Return the indices of one epoch, source by source. ``sources``: the indices of each source's rows."""
    shares = copies([len(indices) for indices in sources], weights)
    parts = []
    for number, (indices, share) in enumerate(zip(sources, shares, strict=True)):
        repeats, rest = divmod(share, len(indices))
        order = np.random.Generator(np.random.PCG64([seed, number])).permutation(len(indices))
        parts += [indices] * repeats + [indices[np.sort(order[:rest])]]
    return np.concatenate(parts)

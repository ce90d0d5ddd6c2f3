"""Which worker sends which samples to which: a plan, made from metadata alone.

Samples lie where the push-pull stream put them; the batch plan wants them elsewhere, and on every stage and tensor
rank of a DP rank. The master plans, the workers move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from realsys.errors import StuckError
from realsys.types import Transfer


def plan_transfers(
    needs: Mapping[int, Sequence[str]],
    keys: Sequence[str],
    owners: Mapping[str, Collection[int]],
    sizes: Mapping[str, int] | None = None,
) -> list[Transfer]:
    """Transfers after which each worker holds the arrays ``keys`` of all samples it needs.

    needs   worker -> sample ids it will use (repeats are fine)
    owners  sample id -> workers that hold its ``keys`` now; every one may send
    sizes   sample id -> tokens, to balance what the owners send; without it each sample counts 1

    What a worker holds already is not moved, nothing reaches a worker twice, and there is at most one transfer per
    (source, destination). Ordered by source, then destination; within one, ids as the destination listed them.
    Raises StuckError naming a sample that nobody holds.
    """
    wanted = _missing(needs, owners)
    sent: dict[int, int] = {}
    source: dict[tuple[int, str], int] = {}
    # Those with least choice first, then the largest: the free and the small ones level out what these leave.
    for dst, sample in sorted(wanted, key=lambda move: (len(owners[move[1]]), -_size(move[1], sizes), move)):
        src = min(owners[sample], key=lambda worker: (sent.get(worker, 0), worker))
        sent[src] = sent.get(src, 0) + _size(sample, sizes)
        source[dst, sample] = src
    merged: dict[tuple[int, int], list[str]] = {}
    for dst, sample in wanted:
        merged.setdefault((source[dst, sample], dst), []).append(sample)
    return [Transfer(src=src, dst=dst, sample_ids=ids, keys=list(keys)) for (src, dst), ids in sorted(merged.items())]


def _missing(needs: Mapping[int, Sequence[str]], owners: Mapping[str, Collection[int]]) -> list[tuple[int, str]]:
    """(worker, sample) for each sample a worker needs and does not hold, once."""
    moves: dict[tuple[int, str], None] = {}  # ordered set
    for worker in sorted(needs):
        for sample in needs[worker]:
            holders = owners.get(sample, ())
            if not holders:
                raise StuckError(f"worker {worker} needs sample {sample}, and no worker holds it")
            if worker not in holders:
                moves[worker, sample] = None
    return list(moves)


def _size(sample: str, sizes: Mapping[str, int] | None) -> int:
    return 1 if sizes is None else sizes[sample]

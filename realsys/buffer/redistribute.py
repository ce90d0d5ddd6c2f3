"""Which worker sends which samples to which: a plan, made from metadata alone.

Samples lie where the push-pull stream put them, and results where a call made them; the next call wants them on the
ranks of its own mesh, split as its plan says. The master plans, the workers move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from realsys.cluster.topology import Mesh
from realsys.errors import StuckError
from realsys.types import ARRAY_KEYS, METADATA_KEYS, SequenceRef, Transfer

Minibatches = Sequence[Sequence[Sequence[SequenceRef]]]  # [minibatch][data rank] -> sequences


def plan_call(
    mesh: Mesh, minibatches: Minibatches, keys: Iterable[str], owners: Mapping[str, Mapping[str, Collection[int]]]
) -> list[Transfer]:
    """Transfers after which every rank of ``mesh`` holds what a call on ``minibatches`` reads there.

    ``owners``: key -> sample id -> workers that hold the array now. Whole sequences go to every stage and tensor rank
    of the data rank that works on them, loss masks and arrays of loss tokens to its last stage only; ``METADATA_KEYS``
    are no arrays. Keys that take the same way share a ``Transfer``.

    Raises StuckError naming a sample that nobody holds.
    """
    lengths = {ref.sample_id: ref.length for minibatch in minibatches for part in minibatch for ref in part}
    merged: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
    for key in sorted(set(keys) - METADATA_KEYS):
        # The mask says which logits are scored, and those are on the last stage.
        everywhere = ARRAY_KEYS[key][1] == "sequence" and key != "loss_mask"
        needs = _needs(mesh, minibatches, everywhere=everywhere)
        for transfer in plan_transfers(needs, [key], owners.get(key, {}), lengths):
            merged.setdefault((transfer.src, transfer.dst, tuple(transfer.sample_ids)), []).append(key)
    return [Transfer(src, dst, list(ids), with_keys) for (src, dst, ids), with_keys in merged.items()]


def holders_of_outputs(mesh: Mesh, minibatches: Minibatches) -> dict[str, list[int]]:
    """sample id -> the workers where a call on ``minibatches`` leaves what it makes: its last stage."""
    return {
        ref.sample_id: last_stage(mesh, dp)
        for minibatch in minibatches
        for dp, part in enumerate(minibatch)
        for ref in part
    }


def last_stage(mesh: Mesh, dp: int) -> list[int]:
    """Workers of data rank ``dp`` that hold the last pipeline stage, all tensor ranks."""
    stage = mesh.layout.pipeline - 1
    return [mesh.workers[mesh.rank(dp, tp, stage)] for tp in range(mesh.layout.tensor)]


def _needs(mesh: Mesh, minibatches: Minibatches, *, everywhere: bool) -> dict[int, list[str]]:
    """worker -> ids of the samples it needs."""
    needs: dict[int, list[str]] = {}
    for dp in range(mesh.layout.data):
        ids = [ref.sample_id for minibatch in minibatches for ref in minibatch[dp]]
        needs.update(dict.fromkeys(mesh.dp_members(dp) if everywhere else last_stage(mesh, dp), ids))
    return needs


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

"""Plan of transfers: which worker sends which samples to which worker. It uses metadata only.

Samples are on the worker that received them, and outputs on the worker that computed them. The next call needs both on
the ranks of its own mesh, split by its own plan. The master plans, and the workers transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from realsys.cluster.topology import Mesh
from realsys.errors import StuckError
from realsys.model_calls import Transfer
from realsys.types import ARRAY_KEYS, METADATA_KEYS, SequenceRef

Minibatches = Sequence[Sequence[Sequence[SequenceRef]]]  # [minibatch][data rank] -> sequences


def plan_call(
    mesh: Mesh, minibatches: Minibatches, keys: Iterable[str], owners: Mapping[str, Mapping[str, Collection[int]]]
) -> list[Transfer]:
    """Plan the transfers after which every rank of ``mesh`` holds the arrays that a call on ``minibatches`` reads.

    ``owners``: key -> sample id -> workers that hold the array now. Arrays of whole sequences go to every
    stage and tensor rank of their data rank, loss masks and arrays of loss tokens to its last stage only.
    ``METADATA_KEYS`` are not arrays, so they are ignored. Keys with the same source, destination and
    samples share a ``Transfer``.

    StuckError names a sample that no worker holds.
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
    """Return sample id -> workers that hold the outputs of a call on ``minibatches``: its last stage."""
    return {
        ref.sample_id: last_stage(mesh, dp)
        for minibatch in minibatches
        for dp, part in enumerate(minibatch)
        for ref in part
    }


def last_stage(mesh: Mesh, dp: int) -> list[int]:
    """Return the workers of data rank ``dp`` with the last pipeline stage, one per tensor rank."""
    stage = mesh.layout.pipeline - 1
    return [mesh.workers[mesh.rank(dp, tp, stage)] for tp in range(mesh.layout.tensor)]


def _needs(mesh: Mesh, minibatches: Minibatches, *, everywhere: bool) -> dict[int, list[str]]:
    """Return worker -> ids of the samples that it needs."""
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
    """Plan the transfers after which each worker holds the arrays ``keys`` of all samples that it needs.

    needs   worker -> sample ids; repeats are allowed
    owners  sample id -> workers that hold its ``keys`` now; each of them may send
    sizes   sample id -> tokens, to balance the load of the owners; without it each sample counts 1

    A worker receives a sample at most once, and none that it holds already. There is at most one transfer
    per (source, destination). Transfers are ordered by source, then destination; ids are in the order of
    ``needs``. StuckError names a sample that no worker holds.
    """
    missing = _missing(needs, owners)
    sent: dict[int, int] = {}
    source: dict[tuple[int, str], int] = {}
    # Samples with the fewest owners first, then the largest: the others can still level the load afterwards.
    for dst, sample in sorted(missing, key=lambda move: (len(owners[move[1]]), -_size(move[1], sizes), move)):
        src = min(owners[sample], key=lambda worker: (sent.get(worker, 0), worker))
        sent[src] = sent.get(src, 0) + _size(sample, sizes)
        source[dst, sample] = src
    merged: dict[tuple[int, int], list[str]] = {}
    for dst, sample in missing:
        merged.setdefault((source[dst, sample], dst), []).append(sample)
    return [Transfer(src=src, dst=dst, sample_ids=ids, keys=list(keys)) for (src, dst), ids in sorted(merged.items())]


def _missing(needs: Mapping[int, Sequence[str]], owners: Mapping[str, Collection[int]]) -> list[tuple[int, str]]:
    """Return (worker, sample) once for each sample that a worker needs and does not hold."""
    moves: dict[tuple[int, str], None] = {}  # an ordered set
    for worker in sorted(needs):
        for sample in needs[worker]:
            holders = owners.get(sample, ())
            if not holders:
                raise StuckError(f"worker {worker} needs sample {sample}, but no worker holds it")
            if worker not in holders:
                moves[worker, sample] = None
    return list(moves)


def _size(sample: str, sizes: Mapping[str, int] | None) -> int:
    return 1 if sizes is None else sizes[sample]

"""Plan of transfers: which worker sends which samples to which worker. It uses metadata only.

Samples are on the worker that received them, and outputs on the worker that computed them. The next call needs both on
the ranks of its own mesh, split by its own plan. The master plans, and the workers transfer.

The plan treats samples of one data rank with the same holders alike (``cells``). So its cost grows with the samples and
with the pairs of workers that must exchange something, not with the product of workers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.algorithm.balance import largest_first
from realsys.cluster.topology import Mesh
from realsys.errors import StuckError
from realsys.model_calls import Transfer, TransferRequest
from realsys.types import ARRAY_KEYS, METADATA_KEYS, SequenceRef

Minibatches = Sequence[Sequence[Sequence[SequenceRef]]]  # [minibatch][data rank] -> sequences
Holders = frozenset[int]  # workers
Column = Mapping[str, Holders]  # sample id -> workers that hold one array of it


@dataclass(slots=True)
class TransferPlan:
    """Transfers, and the holders after them: (keys, sample ids, workers that then hold these keys)."""

    transfers: list[Transfer] = field(default_factory=list)
    holders: list[tuple[list[str], list[str], Holders]] = field(default_factory=list)

    @property
    def workers(self) -> set[int]:
        """Return the sources and destinations."""
        return {worker for transfer in self.transfers for worker in (transfer.src, *transfer.dsts)}

    def by_worker(self, minibatches: Minibatches) -> dict[int, TransferRequest]:
        """Return the request of each worker: its transfers, sent and received, and the lengths of their samples.

        Workers with the same transfers share one object, such as the tensor ranks of a data rank that only receive.
        """
        refs = {ref.sample_id: ref for minibatch in minibatches for part in minibatch for ref in part}
        own: defaultdict[int, list[Transfer]] = defaultdict(list)
        # Both ends of a pair see its transfers in the order of the plan, so they agree about the message.
        for transfer in self.transfers:
            own[transfer.src].append(transfer)
            for worker in transfer.dsts:
                own[worker].append(transfer)
        requests: dict[tuple[int, ...], TransferRequest] = {}
        by_worker = {}
        for worker, transfers in sorted(own.items()):
            same = tuple(map(id, transfers))
            if same not in requests:
                names = dict.fromkeys(itertools.chain.from_iterable(t.sample_ids for t in transfers))
                requests[same] = TransferRequest(transfers, [refs[name] for name in names])
            by_worker[worker] = requests[same]
        return by_worker


def cells(columns: Sequence[Column], sample_ids: Sequence[str]) -> dict[tuple[Holders | None, ...], list[str]]:
    """Group samples by their holders in each column (None: no worker holds it). All keep their order."""
    grouped: dict[tuple[Holders | None, ...], list[str]] = {}
    rows = zip(*(map(column.get, sample_ids) for column in columns), strict=True)
    for holders, sample_id in zip(rows, sample_ids, strict=True):
        grouped.setdefault(holders, []).append(sample_id)
    return grouped


def plan_call(mesh: Mesh, minibatches: Minibatches, keys: Iterable[str], owners: Mapping[str, Column]) -> TransferPlan:
    """Plan the transfers after which every rank of ``mesh`` holds the arrays that a call on ``minibatches`` reads.

    ``owners``: key -> sample id -> workers that hold the array now. Arrays of whole sequences go to every
    stage and tensor rank of their data rank, loss masks and arrays of loss tokens to its last stage only.
    ``METADATA_KEYS`` are not arrays, so they are ignored.

    A worker receives an array at most once, and none that it holds already. Sources send arrays that they hold
    before the plan. If several workers hold a sample, the one that sends fewer tokens sends it.
    StuckError names a sample that no worker holds.
    """
    arrays = sorted(set(keys) - METADATA_KEYS)
    if not arrays:
        return TransferPlan()
    columns = [owners.get(key, {}) for key in arrays]
    planner = _Planner(arrays, {ref.sample_id: ref.length for m in minibatches for part in m for ref in part})
    for dp in range(mesh.layout.data):
        last = last_stage(mesh, dp)
        earlier = [worker for worker in mesh.dp_members(dp) if worker not in last]
        members = frozenset([*last, *earlier])
        ids = list(dict.fromkeys(ref.sample_id for minibatch in minibatches for ref in minibatch[dp]))
        for holders_of_arrays, samples in cells(columns, ids).items():
            # Of most calls every rank has everything already.
            if not all(holders and members <= holders for holders in holders_of_arrays):
                planner.bring(samples, holders_of_arrays, last, earlier)
    return planner.finish()


def holders_of_outputs(mesh: Mesh, minibatches: Minibatches) -> dict[str, Holders]:
    """Return sample id -> workers that hold the outputs of a call on ``minibatches``: its last stage."""
    holders = [frozenset(last_stage(mesh, dp)) for dp in range(mesh.layout.data)]
    return {ref.sample_id: holders[dp] for m in minibatches for dp, part in enumerate(m) for ref in part}


def last_stage(mesh: Mesh, dp: int) -> list[int]:
    """Return the workers of data rank ``dp`` with the last pipeline stage, one per tensor rank."""
    stage = mesh.layout.pipeline - 1
    return [mesh.workers[mesh.rank(dp, tp, stage)] for tp in range(mesh.layout.tensor)]


@dataclass(slots=True)
class _Planner:
    """A plan in the making for ``arrays``.

    lengths  sample id -> tokens
    sent     worker -> tokens that it sends
    alike    holders of each array -> (holders, arrays that they hold, those of them that all stages read)
    """

    arrays: Sequence[str]
    lengths: Mapping[str, int]
    plan: TransferPlan = field(default_factory=TransferPlan)
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    shared: list[tuple[list[str], list[str], Holders, list[int]]] = field(default_factory=list)
    alike: dict[tuple[Holders | None, ...], list[tuple[Holders, list[str], list[str]]]] = field(default_factory=dict)

    def bring(
        self,
        samples: list[str],
        holders_of_arrays: tuple[Holders | None, ...],
        last: Sequence[int],
        earlier: Sequence[int],
    ) -> None:
        """Plan what the stages of a data rank miss of samples with the same holders. Raises StuckError."""
        if holders_of_arrays not in self.alike:
            keys: dict[Holders, list[str]] = {}
            for key, holders in zip(self.arrays, holders_of_arrays, strict=True):
                if not holders:
                    raise StuckError(f"worker {last[0]} needs {key} of sample {samples[0]}, but no worker holds it")
                keys.setdefault(holders, []).append(key)
            # the mask says which logits are scored, on the last stage
            self.alike[holders_of_arrays] = [
                (h, held, [k for k in held if ARRAY_KEYS[k][1] == "sequence" and k != "loss_mask"])
                for h, held in keys.items()
            ]
        for holders, held, everywhere in self.alike[holders_of_arrays]:
            self.move(samples, held, holders, last)
            if earlier and everywhere:
                self.move(samples, everywhere, holders, earlier)

    def move(self, samples: list[str], keys: list[str], holders: Holders, to: Sequence[int]) -> None:
        """Plan that the workers ``to`` get ``keys`` of ``samples``, as far as they are not holders."""
        missing = [worker for worker in to if worker not in holders]
        if not missing:
            return
        self.plan.holders.append((keys, samples, holders.union(missing)))
        if len(holders) > 1:
            self.shared.append((samples, keys, holders, missing))
            return
        (source,) = holders
        self.sent[source] += len(missing) * sum(map(self.lengths.__getitem__, samples))
        self.plan.transfers.append(Transfer(source, missing, samples, keys))

    def finish(self) -> TransferPlan:
        """Choose the sources of the samples with several holders, and return the plan."""
        # The fewest holders first: the others can still level the load afterwards.
        for samples, keys, holders, missing in sorted(self.shared, key=lambda move: len(move[2])):
            pieces = self._pieces(samples, -(-len(holders) // len(missing)))
            for worker in missing:
                for piece in pieces:
                    source = min(holders, key=lambda holder: (self.sent[holder], holder))
                    self.sent[source] += sum(map(self.lengths.__getitem__, piece))
                    self.plan.transfers.append(Transfer(source, [worker], piece, keys))
        return self.plan

    def _pieces(self, samples: list[str], count: int) -> list[list[str]]:
        """Split samples into at most ``count`` pieces of about equal length, the largest first."""
        if count == 1 or len(samples) == 1:
            return [samples]
        parts = [part for part in largest_first([self.lengths[name] for name in samples], count) if part]
        pieces = [[samples[i] for i in part] for part in parts]
        return sorted(pieces, key=lambda piece: -sum(self.lengths[name] for name in piece))

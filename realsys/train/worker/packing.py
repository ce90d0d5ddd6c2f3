"""Packs sequences into the tensors of one micro-batch.

    rows, longest first:   c c c s s c s | c c s s | <masked dummy>      c context, s in the loss
    tokens   [t]  the tokens, one row after the other
    rows     [a]  positions whose logits predict a token of the loss (one before the token itself)
    targets  [a]  those tokens

What several rows begin with is packed once (``realsys.algorithm.prefix_tree``):

    c c c | s s | s c s s | <masked dummy>      rows c c c s s, c c c s c s s

A masked dummy ends the micro-batch when sequence parallelism needs a multiple of the tensor ranks.
It is the whole micro-batch when this rank has no sequence left while others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from realsys.algorithm.prefix_tree import RowTree, row_tree
from realsys.cluster.gpu_devices import on_device
from realsys.config.dataflow import TEMPERATURES
from realsys.train.worker.data_manager import Array, DataManager
from realsys.types import ARRAY_KEYS, SequenceRef, constant

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class MicroBatch:
    """One packed micro-batch on one rank.

    ``tokens`` and ``targets`` are None on stages that do not read them.
    """

    refs: list[SequenceRef]
    lengths: list[int]  # lengths of all segments, the dummy last
    rows: torch.Tensor  # int64 [a]; last stage, elsewhere empty
    tokens: torch.Tensor | None = None  # int64 [t]; first stage
    targets: torch.Tensor | None = None  # int64 [a]; last stage
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)  # [a] each, or [a, k] of a teacher; last stage
    temperature: float | torch.Tensor | None = None  # of all loss tokens, or float32 [a]; None: that of the trial
    positions: I64 = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # host [a], positions of the loss tokens, as if the rows lay one after the other; last stage
    #: of each segment those before it in its row; []: the rows share none
    parents: list[tuple[int, ...]] = field(default_factory=list)
    places: I64 | None = None  # host, where each token of the rows is packed; last stage; None: one after the other
    ends: torch.Tensor | None = None  # ``last_rows``, if a loss reads scores; last stage

    def place(self, positions: I64) -> torch.Tensor:
        """Return where the tokens at ``positions`` of the rows are packed, int64, on the device."""
        placed = positions if self.places is None else self.places[positions]
        return on_device(torch.from_numpy(placed), self.rows.device)

    @property
    def loss_tokens(self) -> int:
        return sum(ref.loss_tokens for ref in self.refs)

    def dummy(self, multiple: int) -> MicroBatch:
        """Return a masked dummy of ``multiple`` tokens with the same kinds of tensors."""
        return MicroBatch(
            refs=[],
            lengths=[multiple],
            rows=self.rows[:0],
            tokens=None if self.tokens is None else torch.zeros(multiple, dtype=torch.int64, device=self.tokens.device),
            targets=None if self.targets is None else self.targets[:0],
            arrays={key: array[:0] for key, array in self.arrays.items()},
            temperature=self.temperature[:0] if isinstance(self.temperature, torch.Tensor) else self.temperature,
            ends=None if self.ends is None else self.ends[:0],
        )


class MicroBatchPacker:
    """Builder of the micro-batches of one rank, from the arrays of its DataManager.

    ``multiple``: the tokens of a micro-batch must divide by it. ``first``, ``last``: True on the
    first and on the last pipeline stage; a stage between them reads no tokens, only lengths.
    """

    def __init__(self, data: DataManager, device: torch.device, *, multiple: int, first: bool, last: bool) -> None:
        self._data = data
        self._device = device
        self._multiple = multiple
        self._first = first
        self._last = last

    def pack(self, refs: Sequence[SequenceRef], keys: Sequence[str] = ()) -> MicroBatch:
        """Pack ``refs``, which may be empty. ``keys``: the arrays that the loss reads.

        An array with an additional entry for the end of the row (``values``) is cut to its loss
        tokens.
        """
        # Longest first, so that segments of similar length are neighbours and share a bucket of the
        # attention. The id breaks ties: all tensor ranks must pack the same order.
        ordered = sorted(refs, key=lambda ref: (-ref.length, ref.sample_id))
        tree = row_tree(ordered)
        lengths = [segment.size for segment in tree.segments]
        # An empty rank gets one dummy of ``multiple`` tokens: it must run the same collectives as
        # the ranks with sequences.
        padding = -sum(lengths) % self._multiple if lengths else self._multiple
        if padding:
            lengths.append(padding)
        # All stages need the lengths: attention computes its segments from them.
        batch = MicroBatch(ordered, lengths, self._tensor(np.zeros(0, np.int64)))
        if tree.tokens < sum(ref.length for ref in ordered):
            batch.parents = [segment.parents for segment in tree.segments] + [()] * bool(padding)
        if self._first or self._last:
            rows = self._arrays(ordered, "tokens")
            if self._first:
                # Token 0 as padding. It is its own segment, and no row reads its state, so it
                # changes no result.
                own = [rows[segment.row][segment.begin : segment.end] for segment in tree.segments]
                batch.tokens = self._tensor(np.pad(_concatenate(own, np.int64), (0, padding)))
            if batch.parents:
                _check_shared(tree, rows, ordered)
            if self._last:
                batch.positions = np.flatnonzero(_concatenate(self._arrays(ordered, "loss_mask"), np.bool_))
                self._check_mask(ordered, batch.positions)
                if batch.parents:
                    batch.places = _places(tree)
                # The state one position earlier predicts a token; ``_check_mask`` ensures that it
                # belongs to the same sequence.
                batch.rows = batch.place(batch.positions - 1)
                batch.targets = self._tensor(_concatenate(rows, np.int64)[batch.positions])
        if self._last:
            for key in keys:
                dtype, span = ARRAY_KEYS[key]
                width = self._data.top_k if span == "top_k" else 1
                arrays = [self._data.get(ref.sample_id, key)[: width * ref.loss_tokens] for ref in ordered]
                flat = _concatenate(arrays, np.dtype(dtype).type)
                batch.arrays[key] = self._tensor(flat.reshape(-1, width) if span == "top_k" else flat)
            batch.temperature = self._temperature(ordered)
        return batch

    def _temperature(self, refs: Sequence[SequenceRef]) -> float | torch.Tensor | None:
        """Return the temperature of the loss tokens: one number if all have the same, which costs the head less."""
        if not all(self._data.has(ref.sample_id, TEMPERATURES) for ref in refs):
            return None  # the dataflow does not read them, or these are demonstrations
        flat = _concatenate([self._data.get(ref.sample_id, TEMPERATURES) for ref in refs], np.float32)
        if not len(flat):
            return None
        return float(flat[0]) if constant(flat) else self._tensor(flat)

    def _arrays(self, refs: Sequence[SequenceRef], key: str) -> list[Array]:
        """Return the array ``key`` of all sequences. Each must be as long as the plan says."""
        arrays = [self._data.get(ref.sample_id, key) for ref in refs]
        for ref, array in zip(refs, arrays, strict=True):
            assert len(array) == ref.length, f"{ref.sample_id}: {len(array)} {key} here, {ref.length} in the plan"
        return arrays

    @staticmethod
    def _check_mask(refs: Sequence[SequenceRef], positions: I64) -> None:
        """Check the loss masks against the plan.

        No state predicts the first token of a sequence: in the loss, it would be scored with the
        last state of the sequence packed before it.
        """
        planned = [ref.loss_tokens for ref in refs]
        starts = np.cumsum([0, *(ref.length for ref in refs)])
        counted = np.diff(np.searchsorted(positions, starts)).tolist()
        assert counted == planned, f"loss tokens per sequence: {counted} here, {planned} in the plan"
        assert not np.isin(starts[:-1], positions).any(), "the first token of a sequence is in the loss"

    def per_loss_token(self, batch: MicroBatch, values: Sequence[float]) -> torch.Tensor:
        """Repeat one value per sequence for each of its loss tokens, float32 [a]."""
        counts = [ref.loss_tokens for ref in batch.refs]
        return self._tensor(np.repeat(np.asarray(values, np.float32), counts))

    def _tensor(self, array: Array) -> torch.Tensor:
        return on_device(torch.from_numpy(array), self._device)


def loss_and_end_rows(batch: MicroBatch) -> torch.Tensor:
    """Return the rows of the states of the loss tokens, int64 [a + n]: per sequence before each one
    and after the last.

    A sequence without loss tokens has its last state only.
    """
    counts = np.array([ref.loss_tokens for ref in batch.refs], np.int64)
    stops = np.cumsum(counts)
    ends = np.cumsum([ref.length for ref in batch.refs], dtype=np.int64) - 1
    if len(batch.positions):
        # The state after the last loss token is at that token itself, even if feedback tokens
        # follow in the row.
        ends = np.where(counts > 0, batch.positions[stops - 1], ends)
    # Inserted behind each sequence's own rows: ``split_rows(end=True)`` relies on this order.
    return batch.place(np.insert(batch.positions - 1, stops, ends))


def last_rows(batch: MicroBatch) -> torch.Tensor:
    """Return the row of each sequence's last token, int64 [n]."""
    return batch.place(np.cumsum([ref.length for ref in batch.refs], dtype=np.int64) - 1)


def split_rows(batch: MicroBatch, flat: torch.Tensor, *, end: bool = False) -> dict[str, Array]:
    """Split [a] over the loss tokens of a micro-batch into one host array per sample; with ``end``,
    [a + n] like values.
    """
    host = flat.detach().cpu().numpy()
    sizes = [ref.loss_tokens + end for ref in batch.refs]
    stops = np.cumsum(sizes)
    # Copies: a view would keep the array of the whole micro-batch in memory as long as one of its
    # samples.
    return {
        ref.sample_id: host[stop - size : stop].copy() for ref, size, stop in zip(batch.refs, sizes, stops, strict=True)
    }


def _concatenate(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def _places(tree: RowTree) -> I64:
    """Return where each token of the rows is packed, the rows one after the other."""
    ends = np.cumsum([segment.size for segment in tree.segments])
    parts = [
        np.arange(ends[number] - tree.segments[number].size, ends[number]) for chain in tree.chains for number in chain
    ]
    return _concatenate(parts, np.int64)


def _check_shared(tree: RowTree, rows: Sequence[Array], refs: Sequence[SequenceRef]) -> None:
    """Check that each row has the tokens of the segments that it shares with others."""
    for row, chain in enumerate(tree.chains):
        for segment in (tree.segments[number] for number in chain):
            one, other = (rows[k][segment.begin : segment.end] for k in (row, segment.row))
            same = segment.row == row or np.array_equal(one, other)
            assert same, f"{refs[row].sample_id} and {refs[segment.row].sample_id} do not begin alike, as the plan says"

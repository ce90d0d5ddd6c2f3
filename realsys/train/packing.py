"""Sequences -> the tensors of one packed micro-batch.

    sequences, longest first:   p p p a a a | p p a a | <masked dummy>
    tokens   [t]  the tokens, one sequence after the other
    rows     [a]  positions whose logits predict an answer token (one before the token itself)
    targets  [a]  those answer tokens

A masked dummy closes the micro-batch when sequence parallelism needs a multiple of the tensor ranks, and is all of it
when this rank has no sequence left while others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from realsys.train.data_manager import Array, DataManager
from realsys.types import SequenceRef

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class MicroBatch:
    """One packed micro-batch on one rank. ``tokens`` and ``targets`` are empty on stages that do not read them."""

    refs: list[SequenceRef]
    lengths: list[int]  # of all segments, the dummy last
    rows: torch.Tensor  # int64 [a]
    tokens: torch.Tensor | None = None  # int64 [t]; first stage
    targets: torch.Tensor | None = None  # int64 [a]; last stage
    answers: dict[str, torch.Tensor] = field(default_factory=dict)  # float32 [a] each; last stage

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def answer_tokens(self) -> int:
        return sum(ref.answer_len for ref in self.refs)


class Packer:
    """Builds the micro-batches of one rank from what its DataManager holds.

    ``multiple``: tokens of a micro-batch divide by this. ``first``, ``last``: which pipeline stage this rank is; a
    stage between reads no tokens at all, only lengths.
    """

    def __init__(self, data: DataManager, device: torch.device, *, multiple: int, first: bool, last: bool) -> None:
        self._data, self._device = data, device
        self._multiple, self._first, self._last = multiple, first, last

    def pack(self, refs: Sequence[SequenceRef], answer_keys: Sequence[str] = ()) -> MicroBatch:
        """``refs`` may be empty. ``answer_keys`` are the arrays that the loss needs.

        Of an array that has an entry for the end of the answer, too, only those of its tokens are taken.
        """
        # Longest first, so that segments of like length lie side by side for the attention's buckets.
        ordered = sorted(refs, key=lambda ref: (-ref.length, ref.sample_id))
        lengths = [ref.length for ref in ordered]
        total = sum(lengths)
        padding = -total % self._multiple if total else self._multiple
        if padding:
            lengths.append(padding)
        batch = MicroBatch(ordered, lengths, self._tensor(_answer_rows(ordered)))
        if self._first or self._last:
            arrays = [self._data.get(ref.sample_id, "tokens") for ref in ordered]
            for ref, array in zip(ordered, arrays, strict=True):
                assert len(array) == ref.length, f"{ref.sample_id}: {len(array)} tokens here, {ref.length} in the plan"
            if self._first:
                tokens = np.zeros(total + padding, np.int64)
                if arrays:
                    tokens[:total] = np.concatenate(arrays)
                batch.tokens = self._tensor(tokens)
            if self._last:
                answers = [a[ref.prompt_len :] for ref, a in zip(ordered, arrays, strict=True)]
                batch.targets = self._tensor(_concatenate(answers, np.int64))
        if self._last:
            for key in answer_keys:
                found = [self._data.get(ref.sample_id, key)[: ref.answer_len] for ref in ordered]
                batch.answers[key] = self._tensor(_concatenate(found, np.float32))
        return batch

    def per_answer_token(self, batch: MicroBatch, values: Sequence[float]) -> torch.Tensor:
        """One value per sequence -> one per answer token, float32 [a]."""
        counts = [ref.answer_len for ref in batch.refs]
        return self._tensor(np.repeat(np.asarray(values, np.float32), counts))

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def answer_and_end_rows(batch: MicroBatch) -> torch.Tensor:
    """Rows of the states of the answers, int64 [a + n]: before each answer token and after the last, per sequence."""
    return _rows(batch, [(ref.prompt_len - 1, ref.length) for ref in batch.refs])


def last_rows(batch: MicroBatch) -> torch.Tensor:
    """The row of each sequence's last token, int64 [n]."""
    return _rows(batch, [(ref.length - 1, ref.length) for ref in batch.refs])


def split_answers(batch: MicroBatch, flat: torch.Tensor, *, end: bool = False) -> dict[str, Array]:
    """[a] over the micro-batch's answer tokens -> one host array per sample; with ``end`` [a + n], as of values."""
    host = flat.detach().cpu().numpy()
    sizes = [ref.answer_len + end for ref in batch.refs]
    stops = np.cumsum(sizes)
    # Copies, so that a sample does not keep its whole micro-batch alive.
    return {
        ref.sample_id: host[stop - size : stop].copy() for ref, size, stop in zip(batch.refs, sizes, stops, strict=True)
    }


def _rows(batch: MicroBatch, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.from_numpy(_span_rows(batch.refs, spans)).to(batch.rows.device, non_blocking=True)


def _answer_rows(refs: Sequence[SequenceRef]) -> I64:
    """Row i predicts token i + 1, so answer token j of a sequence is predicted at its prompt_len - 1 + j."""
    for ref in refs:
        assert ref.prompt_len >= 1, f"{ref.sample_id}: without a prompt token nothing predicts the first answer token"
    return _span_rows(refs, [(ref.prompt_len - 1, ref.length - 1) for ref in refs])


def _span_rows(refs: Sequence[SequenceRef], spans: Sequence[tuple[int, int]]) -> I64:
    """For each sequence its rows from ``start`` to before ``stop``, counted over the whole micro-batch."""
    offsets = np.cumsum([0, *(ref.length for ref in refs)])
    parts = [np.arange(offset + a, offset + b) for offset, (a, b) in zip(offsets[:-1], spans, strict=True)]
    return _concatenate(parts, np.int64)


def _concatenate(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

"""Tensors of a step: a DecodeBatch until a completion ends or joins, a PrefillBatch for one pass, and the TokenStore.

The TokenStore has the tokens, log-probs and random numbers of admitted completions, on the device. Each completion has
a slot of ``context`` cells. A step reads and writes one cell per running completion, with one index for all three
arrays; Python keeps nothing per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realsys.generation.embedded.prefix_cache import PrefillPart
from realsys.generation.embedded.sampler import RowParams
from realsys.generation.embedded.scheduler import LayoutPlanner, LiveCompletion, RowGroup
from realsys.types import F32, I32

I64 = npt.NDArray[np.int64]

#: one more group of a prefill pass costs about as much as attention over this many padding tokens
_PREFILL_PLANNER = LayoutPlanner(overhead=256)


@dataclass(slots=True)
class DecodeBatch:
    """The n running completions in row order. ``advance`` moves everything by one token."""

    completions: list[LiveCompletion]
    groups: list[RowGroup]
    params: RowParams
    # On the device, so that a step copies nothing to it.
    ids: Tensor  # int64 [n], tokens to feed next
    positions: Tensor  # int64 [n], positions of ``ids``
    cells: Tensor  # int64 [n], cells of the TokenStore for the tokens that are sampled next
    starts: Tensor | None  # int64 [m], cells of the first tokens of the completions with penalties
    # In host memory, because Python decides with them which rows end.
    lengths: I64  # [n]
    limits: I64  # [n], length at which a completion is cut
    ban_lengths: I64  # [n], length below which a completion must not stop
    stops: I64  # [n, k] stop tokens, padded with -1
    watched: list[int]  # rows that have stop strings

    @classmethod
    def build(cls, completions: Sequence[LiveCompletion], groups: list[RowGroup], store: TokenStore) -> DecodeBatch:
        """Build the batch of ``completions``, which are in row order."""
        device = store.device
        lengths = np.asarray([a.length for a in completions], np.int64)
        slots = np.asarray([a.slot for a in completions], np.int64)
        cells = torch.from_numpy(slots * store.context + lengths).to(device)
        starts = [a.slot * store.context + a.completion_start for a in completions if a.request.params.penalised]
        return cls(
            completions=list(completions),
            groups=groups,
            params=RowParams.build([a.request.params for a in completions], device),
            ids=store.tokens.index_select(0, cells - 1),
            positions=torch.from_numpy(lengths - 1).to(device),
            cells=cells,
            starts=torch.tensor(starts, device=device) if starts else None,
            lengths=lengths,
            limits=np.asarray([a.limit for a in completions], np.int64),
            ban_lengths=np.asarray([a.ban_length for a in completions], np.int64),
            stops=_stop_table(completions),
            watched=[row for row, a in enumerate(completions) if a.request.params.stop],
        )

    def by_completion(self) -> dict[int, int]:
        """Return the length of each completion, by its ``id()``."""
        return {id(c): length for c, length in zip(self.completions, self.lengths.tolist(), strict=True)}

    def banned(self) -> Tensor | None:
        """Return the (row, token) pairs that must not be drawn in this step, int64 [b, 2], or None.

        They are the stop tokens of completions that are too short to end.
        """
        rows = np.flatnonzero(self.lengths < self.ban_lengths)
        if not len(rows):
            return None
        where, column = np.nonzero(self.stops[rows] >= 0)
        pairs = np.stack([rows[where], self.stops[rows[where], column]], axis=1)
        return torch.from_numpy(pairs).to(self.ids.device) if len(pairs) else None

    def counts(self, store: TokenStore, vocabulary: int) -> Tensor | None:
        """Count each token in the completions that have penalties: float32 [m, vocabulary], or None."""
        penalties = self.params.penalties
        if penalties is None or self.starts is None:
            return None
        return store.counts(self.starts, self.cells.index_select(0, penalties.rows), vocabulary)

    def advance(self, tokens: Tensor) -> dict[int, int | None]:
        """Account for the sampled tokens. Returns the rows that end, with their stop token or None."""
        # In place, without a new batch: a step must cost the same for any number of rows in Python.
        self.ids = tokens
        self.positions.add_(1)
        self.cells.add_(1)
        self.lengths += 1
        for group in self.groups:
            group.length += 1
        drawn = tokens.cpu().numpy()  # the one wait for the device in a step
        hit = (self.stops == drawn[:, None]).any(axis=1)
        ended = np.flatnonzero(hit | (self.lengths >= self.limits))
        return {int(row): int(drawn[row]) if hit[row] else None for row in ended}


def _stop_table(completions: Sequence[LiveCompletion]) -> I64:
    width = max((len(a.request.stops) for a in completions), default=0)
    table = np.full((len(completions), width), -1, np.int64)
    for row, completion in enumerate(completions):
        table[row, : len(completion.request.stops)] = completion.request.stops
    return table


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """b parts of similar length. Their attention is one call over [b, width] with little padding."""

    tokens: slice  # range of the pass's tokens
    places: Tensor  # int64 [tokens], index of each token in the padded [b * width]
    rows: Tensor  # int64 [b]
    starts: Tensor | None  # int64 [b], first position; None: all begin at 0
    width: int
    reach: int  # number of cache positions that are read


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The N tokens of one prefill pass, packed part by part; ``groups`` cover them in order."""

    ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    rows: Tensor  # int64 [N]
    groups: list[PrefillGroup]

    @classmethod
    def build(cls, parts: Sequence[PrefillPart], store: TokenStore) -> PrefillBatch:
        """Build the pass over ``parts`` of at least one token each; completions must have their rows."""
        parts = sorted(parts, key=lambda part: part.start - part.stop)  # longest first, for the planner
        starts = np.asarray([part.start for part in parts], np.int64)
        lengths = np.asarray([part.stop for part in parts], np.int64) - starts
        slots = np.asarray([part.completion.slot for part in parts], np.int64)
        rows = np.asarray([part.completion.row for part in parts], np.int64)
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = np.repeat(starts, lengths) + offsets
        first, groups = 0, []

        def tensor(values: I64) -> Tensor:
            return torch.from_numpy(values).to(store.device)

        for begin, end in _PREFILL_PLANNER.split(lengths):
            counts, width = lengths[begin:end], int(lengths[begin])
            tokens = slice(first, first + int(counts.sum()))
            groups.append(
                PrefillGroup(
                    tokens,
                    places=tensor(np.repeat(np.arange(end - begin) * width, counts) + offsets[tokens]),
                    rows=tensor(rows[begin:end]),
                    starts=tensor(starts[begin:end]) if starts[begin:end].any() else None,
                    width=width,
                    reach=int((starts + lengths)[begin:end].max()),
                )
            )
            first = tokens.stop
        cells = np.repeat(slots * store.context, lengths) + positions
        ids = store.tokens.index_select(0, tensor(cells))
        return cls(ids, tensor(positions), tensor(np.repeat(rows, lengths)), groups)


# ---- tokens, log-probs and random numbers on the device


class TokenStore:
    """Flat arrays of slots * context cells; cell (slot, p) holds the token at position p of that slot's sequence."""

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.context = context
        self.device = device
        cells = slots * context
        self.tokens = torch.zeros(cells, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(cells, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(cells, dtype=torch.float32, device=device)

    def open(self, slot: int, prompt: I32, uniforms: F32) -> None:
        """Write a prompt into a slot, and the random numbers of its completion into the cells after it."""
        start = slot * self.context
        end = start + len(prompt)
        self.tokens[start:end] = torch.from_numpy(prompt.astype(np.int64)).to(self.device)
        self.uniforms[end : end + len(uniforms)] = torch.from_numpy(uniforms).to(self.device)

    def write(self, cells: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Write one token and log-prob per cell."""
        self.tokens.index_copy_(0, cells, tokens)
        self.logprobs.index_copy_(0, cells, logprobs)

    def read(self, slot: int, start: int, stop: int) -> tuple[I32, F32]:
        """Copy positions start..stop-1 of a slot to host memory."""
        cells = slice(slot * self.context + start, slot * self.context + stop)
        tokens: I32 = self.tokens[cells].cpu().numpy().astype(np.int32)
        # copy(): on a CPU, numpy() shares the memory, which the next completion of the slot overwrites.
        logprobs: F32 = self.logprobs[cells].cpu().numpy().copy()
        return tokens, logprobs

    def counts(self, starts: Tensor, stops: Tensor, vocabulary: int) -> Tensor:
        """Count each token in cells starts[i]..stops[i]-1: float32 [len(starts), vocabulary]."""
        offsets = torch.arange(int((stops - starts).max()), device=self.device)
        cells = starts.unsqueeze(1) + offsets
        inside = cells < stops.unsqueeze(1)
        # A cell outside is replaced by the first one, with weight 0: it may be beyond the whole array.
        tokens = self.tokens[torch.where(inside, cells, starts.unsqueeze(1))]
        counts = torch.zeros(len(starts), vocabulary, device=self.device)
        return counts.scatter_add_(1, tokens, inside.float())

    def tails(self, stops: Tensor, width: int) -> list[list[int]]:
        """Return the ``width`` tokens before each cell of ``stops``.

        The first of them may belong to another sequence; the caller knows how many are its own.
        """
        cells = stops.unsqueeze(1) + torch.arange(-width, 0, device=self.device)
        tails: list[list[int]] = self.tokens[cells.clamp_(min=0)].tolist()
        return tails

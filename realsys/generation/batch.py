"""What a decode step needs and what stays the same until an answer ends or joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realsys.generation.layout import RowGroup
from realsys.generation.sampler import RowParams
from realsys.generation.scheduler import Answer
from realsys.generation.token_store import TokenStore

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """The n running answers in row order. ``advance`` moves everything by one token."""

    answers: list[Answer]
    groups: list[RowGroup]
    params: RowParams
    ids: Tensor  # int64 [n], fed next
    positions: Tensor  # int64 [n], of ids
    cells: Tensor  # int64 [n], of the token sampled next, in the TokenStore
    lengths: I64  # [n]
    limits: I64  # [n], length at which an answer is cut
    ban_lengths: I64  # [n], length below which stop tokens must not be drawn
    stops: I64  # [n, k] stop tokens, padded with -1

    @classmethod
    def build(cls, answers: Sequence[Answer], groups: list[RowGroup], store: TokenStore) -> Batch:
        device = store.device
        lengths = np.asarray([a.length for a in answers], np.int64)
        slots = np.asarray([a.slot for a in answers], np.int64)
        cells = torch.from_numpy(slots * store.context + lengths).to(device)
        return cls(
            answers=list(answers),
            groups=groups,
            params=RowParams.build([a.request.params for a in answers], device),
            ids=store.tokens.index_select(0, cells - 1),
            positions=torch.from_numpy(lengths - 1).to(device),
            cells=cells,
            lengths=lengths,
            limits=np.asarray([a.limit for a in answers], np.int64),
            ban_lengths=np.asarray([a.ban_length for a in answers], np.int64),
            stops=_stop_table(answers),
        )

    def banned(self) -> Tensor | None:
        """(row, token) pairs that may not be drawn in this step: stop tokens of answers that are too short."""
        rows = np.flatnonzero(self.lengths < self.ban_lengths)
        if not len(rows):
            return None
        where, column = np.nonzero(self.stops[rows] >= 0)
        pairs = np.stack([rows[where], self.stops[rows[where], column]], axis=1)
        return torch.from_numpy(pairs).to(self.ids.device) if len(pairs) else None

    def advance(self, tokens: Tensor) -> list[tuple[int, bool]]:
        """Account for the tokens just sampled. Returns (row, whether it hit a stop token) of the answers that end."""
        self.ids = tokens
        self.positions.add_(1)
        self.cells.add_(1)
        self.lengths += 1
        for group in self.groups:
            group.length += 1
        drawn = tokens.cpu().numpy()
        hit = (self.stops == drawn[:, None]).any(axis=1)
        ended = np.flatnonzero(hit | (self.lengths >= self.limits))
        return [(int(row), bool(hit[row])) for row in ended]


def _stop_table(answers: Sequence[Answer]) -> I64:
    width = max((len(a.request.stops) for a in answers), default=0)
    table = np.full((len(answers), width), -1, np.int64)
    for row, answer in enumerate(answers):
        table[row, : len(answer.request.stops)] = answer.request.stops
    return table

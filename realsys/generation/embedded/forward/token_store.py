"""Store of the tokens, log-probs and random numbers of admitted completions, on the device.

Each completion has a slot of ``context`` cells. A step reads and writes one cell per running completion, with one index
for all three arrays; Python keeps nothing per token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from realsys.types import F32, I32


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

"""Tokens, log-probs and random numbers of the running answers, one slot of ``context`` cells each, on the device.

A step reads and writes one cell per running answer with one index for all three; nothing is kept per token in Python.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from realsys.types import F32, I32


class TokenStore:
    """Flat arrays of slots * context cells; cell (slot, p) holds the token at position p of that slot's sequence."""

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.context, self.device = context, device
        cells = slots * context
        self.tokens = torch.zeros(cells, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(cells, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(cells, dtype=torch.float32, device=device)

    def open(self, slot: int, prompt: I32, uniforms: F32) -> None:
        """Put a prompt into a slot, and the random numbers for its answer behind it."""
        start = slot * self.context
        end = start + len(prompt)
        self.tokens[start:end] = torch.from_numpy(prompt.astype(np.int64)).to(self.device)
        self.uniforms[end : end + len(uniforms)] = torch.from_numpy(uniforms).to(self.device)

    def write(self, cells: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        self.tokens.index_copy_(0, cells, tokens)
        self.logprobs.index_copy_(0, cells, logprobs)

    def read(self, slot: int, start: int, stop: int) -> tuple[I32, F32]:
        """Copies of positions start..stop-1."""
        cells = slice(slot * self.context + start, slot * self.context + stop)
        tokens: I32 = self.tokens[cells].cpu().numpy().astype(np.int32)
        logprobs: F32 = self.logprobs[cells].cpu().numpy().copy()
        return tokens, logprobs

    def counts(self, starts: Tensor, stops: Tensor, vocabulary: int) -> Tensor:
        """How often each token stands in cells starts[i]..stops[i]-1: float32 [len(starts), vocabulary]."""
        offsets = torch.arange(int((stops - starts).max()), device=self.device)
        cells = starts.unsqueeze(1) + offsets
        inside = cells < stops.unsqueeze(1)
        tokens = self.tokens[torch.where(inside, cells, starts.unsqueeze(1))]
        counts = torch.zeros(len(starts), vocabulary, device=self.device)
        return counts.scatter_add_(1, tokens, inside.float())

    def tails(self, stops: Tensor, width: int) -> list[list[int]]:
        """The ``width`` tokens before each cell of ``stops``; the first of them may belong to another sequence."""
        cells = stops.unsqueeze(1) + torch.arange(-width, 0, device=self.device)
        tails: list[list[int]] = self.tokens[cells.clamp_(min=0)].tolist()
        return tails

"""Sampling of one token per row by inverse CDF.

The log-prob returned is the natural log of the token's probability under softmax(logits / temperature), before top-k,
top-p and the ban on early stops: the distribution that a trainer can recompute. At temperature 0 (greedy) it is that
of temperature 1. Every row's result depends on its own logits and uniform only, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.generation.protocol import SamplingParams


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of the running rows as tensors; None where no row needs the step."""

    temperature: Tensor | None  # [n, 1]
    greedy: Tensor | None  # bool [n]
    filtered: Tensor | None  # rows with top-k or top-p, int64 [m]
    top_p: Tensor | None  # [m, 1]
    top_k: Tensor | None  # [m, 1]

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        def tensor(values: list[float] | list[int] | list[bool], *shape: int) -> Tensor:
            return torch.tensor(values, device=device).view(*shape)

        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0 or p.top_k == 1 for p in params]
        filtered = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1 or p.top_k > 0)]
        return cls(
            temperature=tensor(temperatures, -1, 1) if any(t != 1.0 for t in temperatures) else None,
            greedy=tensor(greedy, -1) if any(greedy) else None,
            filtered=tensor(filtered, -1) if filtered else None,
            top_p=tensor([params[i].top_p for i in filtered], -1, 1) if filtered else None,
            top_k=tensor([params[i].top_k if params[i].top_k > 0 else 1 << 30 for i in filtered], -1, 1)
            if filtered
            else None,
        )


def sample(logits: Tensor, params: RowParams, uniform: Tensor, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float32 logits [n, V] (overwritten), uniform [n] in [0, 1) -> tokens int64 [n], log-probs float32 [n].

    ``banned`` [b, 2] lists (row, token) that must not be drawn.
    """
    if params.temperature is not None:
        logits.div_(params.temperature)
    probabilities = logits.softmax(-1)
    weights = probabilities
    if banned is not None:
        logits[banned[:, 0], banned[:, 1]] = float("-inf")
        weights = logits.softmax(-1)
    if params.filtered is not None:
        kept = _filter(weights.index_select(0, params.filtered), params)
        weights = weights.index_copy(0, params.filtered, kept)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first entry above it exists and has a weight of its own.
    threshold = torch.minimum(total * uniform.unsqueeze(1), torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if params.greedy is not None:
        tokens = torch.where(params.greedy.unsqueeze(1), weights.argmax(-1, keepdim=True), tokens)
    # NaN weights (from weights that overflow) would index past the end; the engine reports them by their log-prob.
    tokens.clamp_(max=logits.shape[1] - 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).log_().squeeze(1)


def _filter(weights: Tensor, params: RowParams) -> Tensor:
    """Zero what top-k or top-p cut off. top-p keeps the smallest set of most probable tokens that reaches it."""
    assert params.top_p is not None and params.top_k is not None
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(weights.shape[1], device=weights.device)
    cut = (before >= params.top_p) & (ranks > 0) | (ranks >= params.top_k)
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(cut, 0.0))

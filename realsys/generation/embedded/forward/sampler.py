"""Sampling of one token per row by inverse CDF.

The log-prob returned is the natural log of the token's probability under softmax(logits / temperature), before
penalties, the ban on early stops, top-k, top-p and min-p: the distribution that a trainer can recompute. At temperature
0 (greedy) it is that of temperature 1. Every row's result depends on its own logits, counts and uniform only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.generation.protocol import SamplingParams


@dataclass(slots=True)
class Filters:
    """top-k, top-p and min-p of the ``rows`` that have any, int64 [m]; the others [m, 1]."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(slots=True)
class Penalties:
    """Of the ``rows`` that have any, int64 [m]; the others [m, 1], ``presence`` and ``frequency`` per temperature."""

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of the running rows as tensors; None where no row needs the step."""

    temperature: Tensor | None  # [n, 1]
    greedy: Tensor | None  # bool [n]
    filters: Filters | None
    penalties: Penalties | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0 or p.top_k == 1 for p in params]
        return cls(
            temperature=_column(temperatures, device) if any(t != 1.0 for t in temperatures) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            filters=_filters(params, greedy, device),
            penalties=_penalties(params, temperatures, device),
        )


def _filters(params: Sequence[SamplingParams], greedy: list[bool], device: torch.device) -> Filters | None:
    rows = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)]
    if not rows:
        return None
    return Filters(
        torch.tensor(rows, device=device),
        top_k=_column([params[i].top_k if params[i].top_k > 0 else 1 << 30 for i in rows], device),
        top_p=_column([params[i].top_p for i in rows], device),
        min_p=_column([params[i].min_p for i in rows], device),
    )


def _penalties(params: Sequence[SamplingParams], temperatures: list[float], device: torch.device) -> Penalties | None:
    rows = [i for i, p in enumerate(params) if p.penalised]
    if not rows:
        return None
    # They are defined on logits, and applied to logits / temperature; a factor commutes with the division.
    return Penalties(
        torch.tensor(rows, device=device),
        repetition=_column([params[i].repetition_penalty for i in rows], device),
        presence=_column([params[i].presence_penalty / temperatures[i] for i in rows], device),
        frequency=_column([params[i].frequency_penalty / temperatures[i] for i in rows], device),
    )


def _column(values: list[float] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1)


def sample(
    logits: Tensor,
    params: RowParams,
    uniform: Tensor,
    banned: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float32 logits [n, V] (overwritten), uniform [n] in [0, 1) -> tokens int64 [n], log-probs float32 [n].

    ``banned`` [b, 2] lists (row, token) that must not be drawn. ``counts`` [m, V]: how often the answers in
    ``params.penalties.rows`` hold each token.
    """
    if params.temperature is not None:
        logits.div_(params.temperature)
    probabilities = logits.softmax(-1)
    weights, changed = probabilities, banned is not None or counts is not None
    before = logits.clone() if changed else logits
    if counts is not None:
        _penalise(logits, params, counts)
    if banned is not None:
        logits[banned[:, 0], banned[:, 1]] = float("-inf")
    if changed:
        weights = logits.softmax(-1)
    if params.filters is not None:
        rows = params.filters.rows
        weights = weights.index_copy(0, rows, _cut(weights.index_select(0, rows), params.filters))
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first entry above it exists and has a weight of its own.
    threshold = torch.minimum(total * uniform.unsqueeze(1), torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if params.greedy is not None:
        tokens = torch.where(params.greedy.unsqueeze(1), weights.argmax(-1, keepdim=True), tokens)
    # NaN weights (from weights that overflow) would index past the end; the engine reports them by their log-prob.
    tokens.clamp_(max=logits.shape[1] - 1)
    if changed:  # what is drawn may have had next to no probability: as a float it may be 0, its logarithm is a number
        logprobs = before.gather(1, tokens) - before.logsumexp(-1, keepdim=True)
    else:
        logprobs = probabilities.gather(1, tokens).log_()
    return tokens.squeeze(1), logprobs.squeeze(1)


def _penalise(logits: Tensor, params: RowParams, counts: Tensor) -> None:
    """Change the logits of tokens that their answers hold already, in place."""
    penalties = params.penalties
    assert penalties is not None
    rows = logits.index_select(0, penalties.rows)
    seen = counts > 0
    scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
    rows = torch.where(seen, scaled - penalties.presence, rows) - penalties.frequency * counts
    logits.index_copy_(0, penalties.rows, rows)


def _cut(weights: Tensor, filters: Filters) -> Tensor:
    """Zero what top-k, top-p or min-p cut off, each looking at all of ``weights``.

    top-p keeps the smallest set of most probable tokens that reaches it, min-p those of at least that share of the most
    probable one's weight. The most probable token stays.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(weights.shape[1], device=weights.device)
    cut = (ranks >= filters.top_k) | (before >= filters.top_p) | (ordered < ordered[:, :1] * filters.min_p)
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(cut & (ranks > 0), 0.0))

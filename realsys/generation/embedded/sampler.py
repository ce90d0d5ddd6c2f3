"""Sampling of one token per row by inverse CDF.

The log-prob returned is the natural log of the token's probability under softmax(logits / temperature), before
penalties, the ban on early stops, top-k, top-p and min-p: the distribution that a trainer can recompute. At temperature
0 (greedy) it is the log-prob at temperature 1. A row's result depends on its own logits, counts and uniform only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realsys.generation.protocol import SamplingParams


@dataclass(slots=True)
class Filters:
    """top-k, top-p and min-p, each [m, 1], of the ``rows`` that have any, int64 [m]."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(slots=True)
class Penalties:
    """Penalties, each [m, 1], of the ``rows`` that have any, int64 [m].

    ``presence`` and ``frequency`` are divided by the temperature.
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(slots=True)
class TopRows:
    """The ``rows`` that want the most probable tokens, int64 [m]; ``counts``: how many each, at most ``width``."""

    rows: Tensor
    indices: list[int]
    counts: list[int]
    width: int


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of the running rows as tensors; None if no row needs the step."""

    temperature: Tensor | None  # [n, 1]
    greedy: Tensor | None  # bool [n]
    filters: Filters | None
    penalties: Penalties | None
    top: TopRows | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device) -> RowParams:
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0 or p.top_k == 1 for p in params]
        return cls(
            temperature=_column(temperatures, device) if any(t != 1.0 for t in temperatures) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            filters=_filters(params, greedy, device),
            penalties=_penalties(params, temperatures, device),
            top=_top_rows(params, device),
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
    # Penalties are defined on logits, but applied to logits / temperature. The repetition penalty is a
    # factor, which commutes with the division; the two others are summands and must be divided too.
    return Penalties(
        torch.tensor(rows, device=device),
        repetition=_column([params[i].repetition_penalty for i in rows], device),
        presence=_column([params[i].presence_penalty / temperatures[i] for i in rows], device),
        frequency=_column([params[i].frequency_penalty / temperatures[i] for i in rows], device),
    )


def _top_rows(params: Sequence[SamplingParams], device: torch.device) -> TopRows | None:
    rows = [i for i, p in enumerate(params) if p.top_logprobs_num]
    if not rows:
        return None
    counts = [params[i].top_logprobs_num for i in rows]
    return TopRows(torch.tensor(rows, device=device), rows, counts, max(counts))


def _column(values: list[float] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1)


def sample(
    logits: Tensor,
    params: RowParams,
    uniform: Tensor,
    banned: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: tokens int64 [n], log-probs float32 [n].

    logits   float32 [n, V], overwritten
    uniform  float32 [n], in [0, 1)
    banned   int64 [b, 2], (row, token) pairs that must not be drawn
    counts   float32 [m, V], number of each token in the completions of ``params.penalties.rows``
    """
    if params.temperature is not None:
        logits.div_(params.temperature)
    probabilities = logits.softmax(-1)
    weights, changed = probabilities, banned is not None or counts is not None
    before = logits.clone() if changed else logits  # the log-prob is of the logits before the changes
    if counts is not None:
        _penalise(logits, params, counts)
    if banned is not None:
        logits[banned[:, 0], banned[:, 1]] = float("-inf")
    if changed:
        weights = logits.softmax(-1)
    if params.filters is not None:
        rows = params.filters.rows
        weights = weights.index_copy(0, rows, _cut(weights.index_select(0, rows), params.filters))
    # Inverse CDF with one uniform per row, not torch.multinomial: that would read a shared generator,
    # and a token would depend on the rows that happen to be in the batch.
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total (which is not exactly 1 in float32), so that an entry above the threshold
    # exists, and the first one has a positive weight: a token that was cut off is never drawn.
    threshold = torch.minimum(total * uniform.unsqueeze(1), torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if params.greedy is not None:
        tokens = torch.where(params.greedy.unsqueeze(1), weights.argmax(-1, keepdim=True), tokens)
    # NaN weights (from weights that overflow) would index past the end; the engine reports them by their log-prob.
    tokens.clamp_(max=logits.shape[1] - 1)
    if changed:
        # A token that was very improbable before the changes may be drawn. Its probability may round to
        # 0 in float32, so its log-prob is computed from the logits.
        logprobs = before.gather(1, tokens) - before.logsumexp(-1, keepdim=True)
    else:
        logprobs = probabilities.gather(1, tokens).log_()
    return tokens.squeeze(1), logprobs.squeeze(1)


def top_logprobs(logits: Tensor, params: RowParams) -> dict[int, list[tuple[int, float]]]:
    """Return row -> (token, log-prob) of its most probable tokens, most probable first, for the rows that want them.

    logits   float32 [n, V], as ``sample`` takes them; not changed. Of the same distribution as its log-probs
    """
    top = params.top
    if top is None:
        return {}
    rows = logits.index_select(0, top.rows)
    if params.temperature is not None:
        rows.div_(params.temperature.index_select(0, top.rows))
    values, tokens = rows.topk(min(top.width, rows.shape[1]))
    logprobs = (values - rows.logsumexp(-1, keepdim=True)).tolist()
    pairs = (zip(*pair, strict=True) for pair in zip(tokens.tolist(), logprobs, strict=True))
    return {row: list(best)[:count] for row, count, best in zip(top.indices, top.counts, pairs, strict=True)}


def _penalise(logits: Tensor, params: RowParams, counts: Tensor) -> None:
    """Change, in place, the logits of tokens that the completions contain already."""
    penalties = params.penalties
    assert penalties is not None
    rows = logits.index_select(0, penalties.rows)
    seen = counts > 0
    # Towards improbable, whatever the sign: dividing a negative logit would make the token more probable.
    scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
    rows = torch.where(seen, scaled - penalties.presence, rows) - penalties.frequency * counts
    logits.index_copy_(0, penalties.rows, rows)


def _cut(weights: Tensor, filters: Filters) -> Tensor:
    """Set the weights that top-k, top-p or min-p cut off to zero; each filter sees all of ``weights``.

    top-p keeps the smallest set of most probable tokens that reaches it. min-p keeps the tokens with at
    least that share of the most probable token's weight. The most probable token always stays.
    """
    # A stable sort, so that equal weights are cut in the same order on every device and in every batch.
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(weights.shape[1], device=weights.device)
    cut = (ranks >= filters.top_k) | (before >= filters.top_p) | (ordered < ordered[:, :1] * filters.min_p)
    return torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(cut & (ranks > 0), 0.0))

"""Staleness of single tokens: which rows of a group are trained if no token older than a bound may be. Pure.

A token that is too old stays in the context and leaves the loss. This module changes metadata; the worker that holds
the row makes the same choice from the same versions (``realsys.train.data_manager``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from realsys.types import SampleMeta


def mask_group(group: Sequence[SampleMeta], oldest: int) -> list[SampleMeta]:
    """Return the rows of a group as they are trained without the tokens of versions below ``oldest``.

    A row without remaining tokens is left out, and an episode without rows with it; the result is empty
    if no token remains. Rows of an episode that lost tokens are copies; all others are the rows themselves.
    """
    if all(sample.version_min >= oldest for sample in group):
        return list(group)
    before = episode_lengths(group)
    rows = [kept for sample in group if (kept := _mask_row(sample, oldest)) is not None]
    after = episode_lengths(rows)
    if not any(after.values()):
        return []
    return [
        replace(row, episode_tokens=after[_episode(row)], sampled_tokens=before[_episode(row)])
        if after[_episode(row)] < before[_episode(row)]
        else row
        for row in rows
    ]


def episode_lengths(rows: Iterable[SampleMeta]) -> Mapping[tuple[str, int], int]:
    """Return (ticket, episode) -> loss tokens of these rows of it."""
    lengths: dict[tuple[str, int], int] = {}
    for row in rows:
        lengths[_episode(row)] = lengths.get(_episode(row), 0) + row.loss_tokens
    return lengths


def _mask_row(sample: SampleMeta, oldest: int) -> SampleMeta | None:
    if sample.version_min >= oldest:
        return sample
    remaining = [(version, tokens) for version, tokens in sample.version_tokens if version >= oldest]
    if not remaining:
        return None
    versions, tokens = zip(*remaining, strict=True)
    return replace(
        sample,
        loss_tokens=sum(tokens),
        kept_tokens=min(sample.kept_tokens, sum(tokens)),
        version_min=min(versions),
        version_max=max(versions),
        version_tokens=remaining,
    )


def _episode(sample: SampleMeta) -> tuple[str, int]:
    return sample.ticket_id, sample.episode

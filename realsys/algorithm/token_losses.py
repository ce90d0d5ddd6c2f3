"""Sampled tokens that are not trained: their count by reason, the bias that this gives to lengths, and the masking of
tokens that are too old. Pure.

    lose(reason, rows) ─┐
    train(batch) ───────┴─> close_step ──> shares of this step, KS distance over the last steps

``no-waste``: a sampled token is thrown away only for a reason that the user chose, and every step says how many were.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from realsys.types import SampleMeta

#: reasons for which sampled tokens are not trained
STALE = "stale"  # their group was discarded as too old, and its prompt issued again
MASKED = "masked"  # too old, alone or with their whole group
SUCCESS_RATE = "success_rate"  # their group has a success rate outside train.ppo.filter
EQUAL_REWARDS = "equal_rewards"  # all episodes of their group have the same reward (train.ppo.filter)
REFUSED = "refused"  # a function of the user refused their group without a reason (train.ppo.filter.accept)
OVER_SAMPLED = "over_sampled"  # their group was complete before their episode ended (rollout.oversample)
NOT_KEPT = "not_kept"  # other episodes of their group were chosen (rollout.keep)
NOT_IN_ROWS = "not_in_rows"  # the agent did not receive their completion, or left it out of its rows
COPY = "copy"  # their group arrived twice, or of a ticket that had ended or was granted to another trainer
FAILED = "failed"  # their episode failed
#: Completions of a discarded copy say nothing about lengths: the ticket has another end.
_NO_COMPLETION = frozenset({COPY})
#: Reasons that staleness alone causes.
TOO_OLD = (STALE, MASKED)

WINDOW_STEPS = 20  # steps over which lengths are compared, and over which the warning is decided
WARN_SHARE = 0.05  # share of sampled tokens lost to staleness


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Result of one step.

    tokens     sampled tokens that are in this batch, or were discarded since the step before
    untrained  reason -> share of these tokens
    too_old    share lost to staleness over the last ``WINDOW_STEPS`` steps
    length_ks  Kolmogorov-Smirnov distance over the same steps: tokens of the completions that were sampled, against
               tokens of the completions that were trained; 0 if all of them were trained whole
    """

    tokens: int
    untrained: dict[str, float]
    too_old: float
    length_ks: float

    @property
    def warning(self) -> bool:
        return self.too_old > WARN_SHARE


NO_LOSSES = StepLosses(0, {}, 0.0, 0.0)


@dataclass(slots=True)
class _Step:
    lost: Counter[str] = field(default_factory=Counter)  # tokens by reason
    trained_tokens: int = 0
    sampled: list[int] = field(default_factory=list)  # tokens of each completion
    trained: list[int] = field(default_factory=list)  # tokens of each completion that are trained

    @property
    def tokens(self) -> int:
        return self.trained_tokens + self.lost.total()


class TokenLosses:
    """Counts since the last step, and those of the last ``WINDOW_STEPS`` steps."""

    def __init__(self) -> None:
        self._now = _Step()
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)

    def lose(self, reason: str, rows: Sequence[SampleMeta]) -> None:
        """Count rows that will not be trained."""
        self._now.lost[reason] += sum(row.loss_tokens for row in rows)
        if reason not in _NO_COMPLETION:
            self._now.sampled.extend(map(rounded_length, episode_lengths(rows).values()))

    def lose_tokens(self, reason: str, tokens: int) -> None:
        """Count tokens that never arrived as rows."""
        if tokens > 0:
            self._now.lost[reason] += tokens

    def lose_lengths(self, lengths: Counter[int]) -> None:
        """Count completions that never arrived as rows: tokens -> completions."""
        self._now.sampled.extend(lengths.elements())

    def train(self, sampled: Iterable[SampleMeta], trained: Iterable[SampleMeta]) -> None:
        """Count a batch: its rows as they were ``sampled``, and as they are ``trained`` after masking."""
        before, after = episode_lengths(sampled), episode_lengths(trained)
        self._now.sampled.extend(map(rounded_length, before.values()))
        self._now.trained.extend(map(rounded_length, after.values()))
        self._now.trained_tokens += sum(after.values())
        if masked := sum(before.values()) - sum(after.values()):
            self._now.lost[MASKED] += masked

    def close_step(self) -> StepLosses:
        """End the step, and return its numbers."""
        step, self._now = self._now, _Step()
        self._steps.append(step)
        steps = self._steps
        too_old = sum(past.lost[reason] for past in steps for reason in TOO_OLD)
        return StepLosses(
            step.tokens,
            {reason: tokens / step.tokens for reason, tokens in sorted(step.lost.items()) if tokens},
            too_old / max(1, sum(past.tokens for past in steps)),
            ks_distance([n for past in steps for n in past.sampled], [n for past in steps for n in past.trained]),
        )


def rounded_length(tokens: int) -> int:
    """Return a length rounded down to 6 binary digits: there are few such lengths, so that they can be counted."""
    shift = max(0, tokens.bit_length() - 6)
    return tokens >> shift << shift


def ks_distance(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples: the largest difference of their empirical distribution
    functions, from 0 to 1. 0 if one of them is empty.
    """
    a, b = np.sort(np.asarray(first, np.float64)), np.sort(np.asarray(second, np.float64))
    if not len(a) or not len(b):
        return 0.0
    values = np.concatenate([a, b])
    below_a = np.searchsorted(a, values, side="right") / len(a)
    below_b = np.searchsorted(b, values, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


# ---- tokens that are too old
#
# They stay in the context and leave the loss. The worker that holds the row makes the same choice from the same
# versions (``realsys.train.worker.data_manager``).


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

"""Choice by outcome: is a finished group worth training on, and which of its episodes. Pure (docs/sampling.md).

episodes of a group ──reason_to_drop──> dropped, for a reason ──> another prompt takes its place
                            └─ kept ──kept_episodes──> the ones that are trained
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from realsys.algorithm.batch.token_losses import EQUAL_REWARDS, SUCCESS_RATE
from realsys.config.sections.schema_sampling import FilterConfig, KeepConfig
from realsys.manager.ledger.prompt_order import sampling_seed


class Judged(Protocol):
    """The part of an episode that this module needs."""

    @property
    def reward(self) -> float: ...

    @property
    def correct(self) -> bool | None: ...


def reason_to_drop(episodes: Sequence[Judged], config: FilterConfig) -> str:
    """Return why a group is not worth training on, "" if it is (DAPO, arXiv 2503.14476, section 3.2).

    The success rate is the share of correct episodes, so each must be right or wrong if it is bounded.
    """
    if config.bounds_success:
        rate = sum(episode.correct is True for episode in episodes) / len(episodes)
        if not config.min <= rate <= config.max:
            return SUCCESS_RATE
    if config.equal_rewards and len({episode.reward for episode in episodes}) == 1:
        return EQUAL_REWARDS
    return ""


def kept_episodes(rewards: Sequence[float], config: KeepConfig, seed: int) -> list[int]:
    """Return the indices of the episodes that are trained, rising; all if there are no more than ``episodes``.

    best     the highest rewards
    spread   the subset whose rewards have the largest variance (PODS, arXiv 2504.13818): it always has the i lowest
             and the others highest, for some i

    Equal rewards are ordered by numbers that ``seed`` draws: not by number or arrival, which depend on the length.
    """
    size, wanted = len(rewards), config.episodes
    if not wanted or size <= wanted:
        return list(range(size))
    ties = np.random.Generator(np.random.PCG64(sampling_seed(seed, size))).permutation(size)
    rising = sorted(range(size), key=lambda k: (rewards[k], ties[k]))
    if config.by == "best":
        return sorted(rising[size - wanted :])
    subsets = [rising[:low] + rising[size - wanted + low :] for low in range(wanted + 1)]
    # Rounded, so that equal variances are equal; the most even split is the best of those.
    variances = [round(float(np.var([rewards[k] for k in subset])), 9) for subset in subsets]
    best = max(range(wanted + 1), key=lambda low: (variances[low], -abs(2 * low - wanted)))
    return sorted(subsets[best])

"""Dynamic sampling: which groups have something to teach (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.config.schema_train import FilterConfig


def keep_group(rewards: Sequence[float], correct_reward: float, cfg: FilterConfig) -> bool:
    """Whether the share of answers to one prompt with ``reward >= correct_reward`` lies within [cfg.min, cfg.max].

    ``rewards``: the verifier's, of all answers to the prompt, before any shaping. Raises ValueError for no answers.
    """
    if not rewards:
        raise ValueError("a group without answers has no success rate")
    success = sum(reward >= correct_reward for reward in rewards) / len(rewards)
    return cfg.min <= success <= cfg.max

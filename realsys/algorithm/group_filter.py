"""Dynamic sampling: filter of groups by success rate (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.config.sections.schema_train import FilterConfig
from realsys.errors import ConfigError


def keep_group(correct: Sequence[bool | None], cfg: FilterConfig) -> bool:
    """Return True if the success rate of a group lies within [cfg.min, cfg.max].

    ``correct`` has one entry per episode of the group. With min 0 and max 1 every group stays, also if
    correctness is not known. Raises ValueError for no episodes, ConfigError if correctness is not known.
    """
    if not correct:
        raise ValueError("a group without episodes has no success rate")
    if cfg.min <= 0 and cfg.max >= 1:
        return True
    if None in correct:
        problem = "needs episodes with correct True or False, but the environment returned None: return it, or set 0"
        raise ConfigError("train.ppo.filter.min", cfg.min, problem)
    return cfg.min <= sum(map(bool, correct)) / len(correct) <= cfg.max

"""Configuration of sampling by outcome: which groups, episodes and prompts are trained (docs/sampling.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from realsys.config.fields import NonNegative, Positive, Probability, Section


class FilterConfig(Section):
    """Dynamic sampling: the RolloutWorker drops groups without a signal, and other prompts take their place."""

    equal_rewards: bool = Field(False, description="drop groups whose episodes all have the same reward")
    min: Probability = Field(0.0, description="lowest success rate that is trained; 0: no limit")
    max: Probability = Field(1.0, description="highest success rate that is trained; 1: no limit")
    max_refills: Positive = Field(
        10,
        description="the run ends after this number of batches' worth of dropped groups, at least 256, without one that"
        " is kept",
    )

    @property
    def bounds_success(self) -> bool:
        """True if the filter needs the success rate."""
        return self.min > 0 or self.max < 1

    @property
    def enabled(self) -> bool:
        return self.equal_rewards or self.bounds_success


class KeepConfig(Section):
    """Choice of the episodes of a finished group that are trained; the others are sampled only to choose from."""

    episodes: NonNegative = Field(0, description="episodes of a group that are trained; 0: all")
    by: Literal["spread", "best"] = Field(
        "spread", description="those whose rewards have the largest variance, or those with the highest rewards"
    )


class CurriculumConfig(Section):
    """Choice of prompts by their measured success rate. It is off with min 0 and max 1."""

    min: Probability = Field(0.0, description="a prompt with a lower success rate is shown less often")
    max: Probability = Field(1.0, description="a prompt with a higher success rate is shown less often")
    floor: Annotated[float, Field(ge=0.01, le=1)] = Field(
        0.1, description="probability that such a prompt is shown all the same when it is its turn"
    )

    @property
    def enabled(self) -> bool:
        return self.min > 0 or self.max < 1

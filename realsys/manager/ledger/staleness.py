"""The paper's admission inequality, in one place: ``floor((N - 1) / B) <= v + eta``.

B is the train batch size in groups, v the published version, eta the staleness bound. N counts the candidate and every
group granted before it that has not been rejected, dropped or lost: running, finished, buffered and trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How many groups may have been granted by version v. ``batch_groups`` is B, ``eta`` the bound in versions."""

    batch_groups: int
    eta: int

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.eta < 0:
            raise ValueError(f"need batch_groups >= 1 and eta >= 0, got {self.batch_groups} and {self.eta}")

    def admits(self, n: int, version: int) -> bool:
        """Whether the n-th group (counted with the candidate) may be granted at ``version``."""
        return (n - 1) // self.batch_groups <= version + self.eta

    def capacity(self, version: int) -> int:
        """The largest N that ``admits`` lets through: B * (v + eta + 1)."""
        return max(0, self.batch_groups * (version + self.eta + 1))

    def headroom(self, counted: int, version: int) -> int:
        """Groups that may still be granted when ``counted`` are. Never negative."""
        return max(0, self.capacity(version) - counted)

    def may_serve(self, served: int, version: int) -> bool:
        """Whether weights of version ``served`` are fresh enough to sample train tokens at ``version``."""
        return 0 <= version - served <= self.eta


@dataclass(slots=True)
class StepStaleness:
    """Lag histogram of one train step."""

    step: int
    version: int
    histogram: dict[str, int] = field(default_factory=dict)

"""The invariant ``admission`` (AReaL, section 5.1): ``floor((N - 1) / B) <= v + eta``.

B is the train batch size in groups, v the published version, eta the staleness bound. N counts the candidate and every
group granted before it that is running, finished, buffered, claimed or trained.

The inequality bounds the version that trains the N-th group, if groups are trained in the order of their grants: it is
at least floor((N - 1) / B). So the group must be sampled from ``oldest_weights``(N) or newer weights. A version is
published some time before a server serves it, so a ticket is granted once a server serves weights that are new enough,
and its calls go to such servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Bound on the groups granted by version v. ``batch_groups`` is B, ``eta`` in versions."""

    batch_groups: int
    eta: int

    def __post_init__(self) -> None:
        if self.batch_groups < 1 or self.eta < 0:
            raise ValueError(f"batch_groups and eta must be at least 1 and 0, not {self.batch_groups} and {self.eta}")

    def oldest_weights(self, n: int) -> int:
        """Return the oldest version that may sample the n-th group: floor((n - 1) / B) - eta."""
        return (n - 1) // self.batch_groups - self.eta

    def admits(self, n: int, version: int) -> bool:
        """Return True if the n-th group, the candidate included, may be granted at ``version``."""
        return self.oldest_weights(n) <= version

    def capacity(self, version: int) -> int:
        """Return the largest N that ``admits`` accepts: B * (v + eta + 1)."""
        return max(0, self.batch_groups * (version + self.eta + 1))

    def headroom(self, counted: int, version: int) -> int:
        """Return how many groups may still be granted when ``counted`` are. Never negative."""
        return max(0, self.capacity(version) - counted)

    def may_serve(self, served: int, version: int) -> bool:
        """Return True if weights of version ``served`` may sample train tokens at ``version``."""
        return 0 <= version - served <= self.eta


@dataclass(slots=True)
class StepStaleness:
    """Staleness histogram of one train step: versions behind -> sequences."""

    step: int
    version: int
    histogram: dict[str, int] = field(default_factory=dict)

"""FailureTally: completions without a verdict, counted by cause, and the point from which the verifier is to blame."""

from __future__ import annotations

from collections import Counter

from realsys.errors import NoVerifierError, RewardError

#: items in a row without a verdict after which the verifier counts as defective: a group could be trained with its
#: cut-off completions only, and the run would continue with them
HOPELESS = 64


class FailureTally:
    """Counts of one RolloutWorker.

    undecided  items without a verdict since the start
    failures   cause -> items since ``take``: those without a verdict, and those over a limit
    """

    def __init__(self) -> None:
        self.undecided = 0
        self.failures: Counter[str] = Counter()
        self._in_a_row = 0  # failures since the last verdict

    def decide(self) -> None:
        """Count an item with a verdict."""
        self._in_a_row = 0

    def fail(self, error: RewardError) -> NoVerifierError | None:
        """Count a failure of an item. After many in a row the verifier or its limit is to blame, not the item.

        Then the attempt must fail with the error that is returned, so that the run ends by name.
        """
        self.failures[error.cause] += 1
        self._in_a_row += 1
        if self._in_a_row < HOPELESS:
            return None
        return NoVerifierError(f"{self._in_a_row} completions in a row had no verdict; the last one: {error}")

    def take(self) -> dict[str, int]:
        """Return the failures since the last call, by cause."""
        failures, self.failures = dict(self.failures), Counter()
        return failures

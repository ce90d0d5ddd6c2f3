"""Decides from the manager's status whether a batch can still fill while no group arrives. Pure.

A wait can last for ever in three ways. All prompts have ended and the batch is short of groups (a
small dataset, most of it failed). Each group fails and is replaced by a fresh one that fails too.
Or each group arrives and its success rate is outside the filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.buffer.token_losses import SUCCESS_RATE
from realsys.config.sections.schema_train import FilterConfig

FEWEST_FAILURES = 32  # dropped groups without an arrival in between, after which a run is stuck
#: Filtered groups without a kept one in between, after which a run is stuck. If only 2 % of the
#: prompts were worth training on, the next 256 would all be filtered out with probability 0.98^256
#: = 0.6 %.
FEWEST_FILTERED = 256


class StuckCheck:
    """Check of one wait for the next group.

    A suspicion must hold for two statuses in a row to be reported.
    """

    def __init__(self, batch_groups: int) -> None:
        self._batch_groups = batch_groups
        self._bound = max(FEWEST_FAILURES, 2 * batch_groups)
        self._dropped: int | None = None  # dropped groups when the wait began
        self._suspected = False

    def check(self, status: Mapping[str, Any], ready: int) -> str | None:
        """Return why no batch can come, or None. ``ready``: groups that wait in the buffer."""
        ledger = status["ledger"]
        reasons = ", ".join(f"{n} x {reason}" for reason, n in ledger["dropped_by_reason"].items()) or "none"
        # Groups that were filtered out have arrived: they are no failures of rollout.
        dropped = ledger["dropped"] - ledger["dropped_by_reason"].get(SUCCESS_RATE, 0)
        if self._dropped is None:
            self._dropped = dropped
        failed = dropped - self._dropped
        if failed >= self._bound:
            return f"{failed} groups were dropped and none arrived (all dropped groups: {reasons})"
        used_up = (
            status["admission"]["reason"] == "exhausted"
            and not ledger["running"]
            and not ledger["waiting"]
            and ledger["finished"] <= ready < self._batch_groups
        )
        if used_up and self._suspected:
            return (
                f"all {ledger['granted']} groups have ended: {ledger['trained']} trained, {ledger['dropped']} dropped "
                f"({reasons}), {ready} left, fewer than the {self._batch_groups} of a batch (train.batch_groups): "
                "decrease it, or add prompts"
            )
        # A group that is in transit looks the same for a moment, so one status alone proves
        # nothing.
        self._suspected = used_up
        return None


def check_filter(in_a_row: int, batch_groups: int, bounds: FilterConfig) -> str | None:
    """Return why no further batch is possible after ``in_a_row`` filtered groups in a row, or None."""
    if in_a_row < max(FEWEST_FILTERED, 4 * batch_groups):
        return None
    return (
        f"the last {in_a_row} groups all have a success rate outside [{bounds.min:g}, {bounds.max:g}] "
        f"(train.ppo.filter) and were dropped: {SUCCESS_RATE}; widen the filter, or change the prompts"
    )

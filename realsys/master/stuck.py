"""Decides from the manager's status whether a batch can still fill while no group arrives. Pure.

A wait can last for ever in three ways. All prompts have ended and the batch is short of groups (a
small dataset, most of it failed). Each group fails and is replaced by a fresh one that fails too.
Or workers filter out each group (`train.ppo.filter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_FAILURES = 32  # dropped groups without an arrival in between, after which a run is stuck
#: Filtered groups without a kept one in between, after which a run is stuck. If only 2 % of the
#: prompts were worth training on, the next 256 would all be filtered out with probability 0.98^256
#: = 0.6 %.
FEWEST_FILTERED = 256


class StuckCheck:
    """Check of one wait for the next group.

    A suspicion must hold for two statuses in a row to be reported.
    """

    def __init__(self, batch_groups: int, max_refills: int) -> None:
        """``max_refills``: batches' worth of groups that may be filtered out during one wait."""
        self._batch_groups = batch_groups
        self._bound = max(FEWEST_FAILURES, 2 * batch_groups)
        self._most_filtered = max(FEWEST_FILTERED, max_refills * batch_groups)
        self._begin: tuple[int, int] | None = None  # groups dropped otherwise, and filtered out, when the wait began
        self._filtered = ""  # the warning, from half of ``_most_filtered`` on
        self._warned = False
        self._suspected = False
        self.is_end = False  # the reason is that the prompts are used up after training: the run ends well

    def check(self, status: Mapping[str, Any], ready: int) -> str | None:
        """Return why no batch can come, or None. ``ready``: groups that wait in the buffer."""
        ledger = status["ledger"]
        drops = ledger["dropped_by_reason"]
        reasons = ", ".join(f"{n} x {reason}" for reason, n in drops.items()) or "none"
        filtered = sum(n for reason, n in drops.items() if reason.startswith("filtered "))
        failed = ledger["dropped"] - filtered  # a group that was filtered out has not failed
        share = filtered / max(1, ledger["trained"] + ledger["dropped"])
        self._begin = self._begin or (failed, filtered)
        failed, filtered = failed - self._begin[0], filtered - self._begin[1]
        seen = f"the last {filtered} groups were all filtered out, {share:.0%} of all groups so far ({reasons})"
        if failed >= self._bound:
            last = f"; the last one: {ledger['last_failure']}" if ledger.get("last_failure") else ""
            return f"none arrived while {failed} groups were dropped (dropped so far: {reasons}{last})"
        used_up = (
            status["admission"]["reason"] == "exhausted"
            and not ledger["running"]
            and not ledger["waiting"]
            and ledger["finished"] <= ready < self._batch_groups
        )
        if used_up and self._suspected:
            self.is_end = ledger["trained"] > 0
            ended = (
                f"all {ledger['granted']} groups have ended: {ledger['trained']} trained, {ledger['dropped']} dropped "
                f"({reasons}), {ready} left, fewer than the {self._batch_groups} of a batch (train.batch_groups)"
            )
            return ended if self.is_end else f"{ended}: decrease it, or add prompts"
        # A group that is in transit looks the same for a moment, so one status alone proves
        # nothing.
        self._suspected = used_up
        if filtered >= self._most_filtered and not used_up:
            return f"{seen}: widen train.ppo.filter, change the prompts, or increase train.ppo.filter.max_refills"
        if 2 * filtered >= self._most_filtered:
            self._filtered = f"{seen}; it is given up after {self._most_filtered} in a row"
        return None

    def warning(self) -> str:
        """Return, once, that half of the groups that may be filtered out in a row have been; else ""."""
        if self._warned or not self._filtered:
            return ""
        self._warned = True
        return self._filtered

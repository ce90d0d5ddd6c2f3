"""Whether a batch can still fill: judged from the manager's status while no group arrives. Pure.

Two ways to wait for ever: every prompt that was to be rolled out has ended and the batch is short of groups (a small
dataset, most of it failed), or group after group fails and is replaced by a fresh one that fails too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_FAILURES = 32  # dropped groups, without one arriving, before a run is given up


class StuckCheck:
    """One wait for the next group. Every look takes a fresh status; what it finds must hold for two looks in a row."""

    def __init__(self, batch_groups: int) -> None:
        self._wanted = batch_groups
        self._bound = max(FEWEST_FAILURES, 2 * batch_groups)
        self._dropped: int | None = None  # when the wait began
        self._suspected = False

    def look(self, status: Mapping[str, Any], ready: int) -> str | None:
        """Why no batch will come, or None. ``ready``: groups that wait in the buffer."""
        ledger = status["ledger"]
        reasons = ", ".join(f"{n} x {reason}" for reason, n in ledger["dropped_by_reason"].items()) or "none"
        if self._dropped is None:
            self._dropped = ledger["dropped"]
        failed = ledger["dropped"] - self._dropped
        if failed >= self._bound:
            return f"{failed} groups were dropped and none arrived (dropped in all: {reasons})"
        used_up = (
            status["admission"]["reason"] == "exhausted"
            and not ledger["running"]
            and not ledger["waiting"]
            and ledger["finished"] <= ready < self._wanted
        )
        if used_up and self._suspected:
            return (
                f"all {ledger['granted']} groups have ended: {ledger['trained']} trained, {ledger['dropped']} dropped "
                f"({reasons}), {ready} left, which is no batch of {self._wanted} (train.batch_groups)"
            )
        self._suspected = used_up
        return None

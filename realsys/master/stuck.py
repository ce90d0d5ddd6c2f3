"""Whether a batch can still fill: judged from the manager's status while no group arrives. Pure.

Three ways to wait for ever: every prompt that was to be rolled out has ended and the batch is short of groups (a small
dataset, most of it failed); group after group fails and is replaced by a fresh one that fails too; or group after group
arrives and is filtered out by its success rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realsys.buffer.sequence_buffer import SUCCESS_RATE
from realsys.config.schema_train import FilterConfig

FEWEST_FAILURES = 32  # dropped groups, without one arriving, before a run is given up
#: Groups filtered out, without one kept, before a run is given up. Were only 2 % of the prompts worth training on, the
#: next 256 would all be filtered out with probability 0.98^256 = 0.6 %.
FEWEST_FILTERED = 256


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
        # Groups that were filtered out have arrived.
        dropped = ledger["dropped"] - ledger["dropped_by_reason"].get(SUCCESS_RATE, 0)
        if self._dropped is None:
            self._dropped = dropped
        failed = dropped - self._dropped
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


def filtered_out(in_a_row: int, batch_groups: int, wanted: FilterConfig) -> str | None:
    """Why no batch will come when ``in_a_row`` groups in a row were filtered out, or None."""
    if in_a_row < max(FEWEST_FILTERED, 4 * batch_groups):
        return None
    return (
        f"the last {in_a_row} groups all have a success rate outside [{wanted.min:g}, {wanted.max:g}] "
        f"(train.ppo.filter) and were dropped: {SUCCESS_RATE}"
    )

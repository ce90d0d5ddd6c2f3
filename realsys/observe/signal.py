"""Says early that the groups of a run carry no signal, and the likely cause. Pure, over the records of the step log.

A group has no signal if its advantages are all 0. With mean=group that is a group whose episodes all have
the same reward; with mean=batch a whole batch of such groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.observe.percent import percent

#: steps that are looked at: a single batch is noise
STEPS = 3
#: share of groups without signal from which the run is warned
NO_SIGNAL = 2 / 3
#: share of cut-off completions that explains wrong ones
CUT_OFF = 0.3

Record = Mapping[str, Any]


class SignalWatch:
    """Watch over the train records of a run, which warns once. ``mean``: ``train.ppo.advantage.mean``."""

    def __init__(self, mean: str) -> None:
        self._mean = mean
        self._last: deque[Record] = deque(maxlen=STEPS)
        self._warned = False

    def observe(self, record: Record, before: float | None = None) -> str:
        """Return the warning if ``record`` is the first that gives one, else ""."""
        self._last.append(record)
        warning = "" if self._warned else signal_warning(list(self._last), self._mean, before)
        self._warned |= bool(warning)
        return warning


def share_without_signal(record: Record, mean: str) -> float:
    """Return the share of a step's groups without signal. ``mean``: ``train.ppo.advantage.mean``."""
    shares = record.get("signal") or {}
    if mean == "group":
        return float(shares.get("equal", 0.0))
    return float(bool(shares.get("batch_equal")) and mean == "batch")


def signal_warning(steps: Sequence[Record], mean: str, before: float | None = None) -> str:
    """Return the warning for the last STEPS of ``steps`` (train records); "" if most groups carry a signal.

    ``before``: accuracy before the first step, if it was measured.
    """
    last = steps[-STEPS:]
    if len(last) < STEPS:
        return ""
    share = sum(share_without_signal(record, mean) for record in last) / STEPS
    if share < NO_SIGNAL:
        return ""
    wrong, right = (_mean([(record.get("signal") or {}).get(name) for record in last]) for name in ("wrong", "right"))
    cut = _mean([record.get("truncated_fraction") for record in last])
    started = "" if before is None else f", accuracy before training {percent(before)}"
    groups = f"{percent(wrong, 0)} all wrong, {percent(right, 0)} all right"
    seen = f"{groups}, {percent(cut, 0)} of the completions cut off{started}"
    idle = f"{percent(share, 0)} of the groups of the last {STEPS} steps carry no signal"
    return f"{idle} ({seen}): {_remedy(wrong, right, cut)}"


def _remedy(wrong: float, right: float, cut: float) -> str:
    if right > wrong:
        return "the prompts are too easy: use harder ones, or train.ppo.filter.equal_rewards=true"
    if cut >= CUT_OFF:
        return "completions are cut off before they end: raise generation.sampling.max_new_tokens"
    if wrong > 0:
        return "the prompts are too hard: use easier ones, data.demos with warmup.steps, or a larger rollout.group_size"
    return "all episodes of a group get the same reward: check the verifier"


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)

"""Says early that the groups of a run carry no signal, and the likely cause, or that its policy drifts away. Pure, over
the records of the step log.

A group has no signal if its advantages are all 0. With mean=group that is a group whose episodes all have
the same reward; with mean=batch a whole batch of such groups.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from realsys.observe.percent import percent

#: steps that are looked at: a single batch is noise
STEPS = 3
#: share of groups without signal from which the run is warned
NO_SIGNAL = 2 / 3
#: share of cut-off completions that explains wrong ones
CUT_OFF = 0.3

#: steps that a number is compared with: the first ones for the entropy, the last ones for jumps
FIRST, LAST = 5, 20
#: share of the first entropy that is left when completions have become alike. It halves in a healthy run
ENTROPY_LEFT = 0.1
#: times its median of the last steps that makes a jump
JUMP = 10.0
#: numbers that may jump, with the least value that matters and what to do
_JUMPS = {
    "grad_norm": (1.0, "lower train.optimizer.lr or train.optimizer.clip_grad"),
    "kl_prox_theta_mean": (0.01, "lower train.optimizer.lr, or set train.ppo.early_stop_kl"),
}
#: effective sample size of w below which few tokens decide a step
ESS_LEFT = 0.5

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
        return "the prompts are too easy: use harder ones, or train.ppo.filter.accept=unequal_rewards"
    if cut >= CUT_OFF:
        return "completions are cut off before they end: raise generation.sampling.max_new_tokens"
    if wrong > 0:
        return "the prompts are too hard: use easier ones, data.demos with warmup.steps, or a larger rollout.group_size"
    return "all episodes of a group get the same reward: check the verifier"


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)


class DriftWatch:
    """Watch over the train records of a run. It warns once of each: entropy that is gone, a jump of the gradient or of
    the distance of a step, few effective tokens.
    """

    def __init__(self) -> None:
        self._first: list[float] = []  # entropies
        self._last: dict[str, deque[float]] = {name: deque(maxlen=LAST) for name in _JUMPS}
        self._warned: set[str] = set()

    def observe(self, record: Record) -> list[str]:
        """Return the warnings that ``record`` is the first to give."""
        stats = dict(record.get("stats") or {})
        if "reward_mean" not in record:  # demonstrations teach certainty
            stats.pop("entropy_mean", None)
        found = {name: text for name, text in self._found(stats).items() if text}
        new = [f"step {record.get('step')}: {text}" for name, text in found.items() if name not in self._warned]
        self._warned |= found.keys()
        return new

    def _found(self, stats: Record) -> dict[str, str]:
        numbers = {name: value for name, value in stats.items() if value is not None and math.isfinite(value)}
        found = {name: self._jump(name, numbers[name]) for name in _JUMPS if name in numbers}
        if (entropy := numbers.get("entropy_mean")) is not None:
            found["entropy"] = self._collapse(entropy)
        if (share := numbers.get("w_ess", 1.0)) < ESS_LEFT:
            remedy = "lower asynchronous.max_staleness, or see agreement in the step log"
            found["w_ess"] = f"behaviour weights leave {percent(share, 0)} of the tokens effective (w_ess): {remedy}"
        return found

    def _collapse(self, entropy: float) -> str:
        if len(self._first) < FIRST:
            self._first.append(entropy)
            return ""
        if entropy >= ENTROPY_LEFT * mean(self._first):
            return ""
        remedy = "completions become alike: lower train.optimizer.lr, or raise train.ppo.entropy_coef"
        return f"entropy fell to {entropy:.3g} from {mean(self._first):.3g} nats in the first {FIRST} steps; {remedy}"

    def _jump(self, name: str, value: float) -> str:
        last, (least, remedy) = self._last[name], _JUMPS[name]
        usual = median(last) if len(last) >= FIRST else math.inf
        last.append(value)
        if value < max(least, JUMP * usual):
            return ""
        return f"{name} jumped to {value:.3g}, from {usual:.3g} (median of the last {len(last) - 1} steps): {remedy}"

"""Monitor of the agreement between generation engine and trainer on log-probs.

It compares the tokens whose log-probs both computed with the same weights.

    actor_inf, before the first minibatch of a step ──> ``agreement/...`` statistics ──> AgreementMonitor
        ──> step record, status page; a warning in the log when it drifts

Their difference is due to numerics only: kernels, precision, batch shapes. It enters every importance
weight. If an engine computes with wrong weights, another temperature or another attention, this is
the first statistic that shows it; all others look as they do with stale samples.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from realsys.config.schema import AgreementConfig

log = logging.getLogger(__name__)

PREFIX = "agreement/"  # prefix of the statistics


class AgreementMonitor:
    """Compares each step with a threshold, and the last steps with the first ones.

    Steps without such tokens are skipped.
    """

    def __init__(self, config: AgreementConfig) -> None:
        self._config = config
        self._first: list[tuple[float, float]] = []  # (tokens, mean difference) of the first steps that had any
        self._last: deque[tuple[float, float]] = deque(maxlen=config.window)
        self._warning = ""

    def observe(self, version: int, stats: Mapping[str, float]) -> dict[str, Any]:
        """Add one step, trained on ``version``; return its values to show, with ``warning`` ("" if all is well).

        ``stats``: statistics of actor_inf. Values are None if the step had no such tokens.
        """
        values = {key.removeprefix(PREFIX): value for key, value in stats.items() if key.startswith(PREFIX)}
        tokens = values.get("tokens", 0.0)
        mean = values.get("difference_mean")
        warning = self._warning_of(tokens, mean) if mean is not None else ""
        self._log_change(version, warning)
        return {
            "version": version,
            "tokens": int(tokens),
            "difference_mean": mean,
            "difference_max": values.get("difference_max"),
            "ratio": values.get("ratio"),
            "warning": warning,
        }

    def _warning_of(self, tokens: float, mean: float) -> str:
        config = self._config
        if len(self._first) < config.window:
            self._first.append((tokens, mean))
        else:
            self._last.append((tokens, mean))
        if not mean <= config.max_difference:  # NaN warns, too
            return (
                f"mean difference {mean:.2g} nats per token is over agreement.max_difference={config.max_difference:g}"
            )
        if len(self._last) < config.window:
            return ""
        before, now = _mean(self._first), _mean(self._last)
        if now > config.max_growth * max(before, config.floor):
            return f"mean difference grew from {before:.2g} to {now:.2g} nats per token over the run"
        return ""

    def _log_change(self, version: int, warning: str) -> None:
        """Log a warning once when it begins and once when it ends; the step record has it every time."""
        if warning and not self._warning:
            log.warning("log-probs of engine and trainer disagree at version %d: %s", version, warning)
        elif self._warning and not warning:
            log.warning("log-probs of engine and trainer agree again at version %d", version)
        self._warning = warning


def _mean(steps: list[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Return the mean over tokens."""
    return sum(tokens * mean for tokens, mean in steps) / sum(tokens for tokens, _ in steps)

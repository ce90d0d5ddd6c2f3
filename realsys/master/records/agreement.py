"""Do generation engine and trainer agree on log-probs? Watches the tokens that both computed with the same weights.

    actor_inf, before the first minibatch of a step ──> ``agreement/...`` statistics ──> AgreementMonitor
        ──> step record, status page; a warning in the log when it drifts

Their difference is numerics alone: kernels, precision, batch shapes. It enters every importance weight, so a loss that
misbehaves because an engine computes something else than it is believed to (wrong weights, another temperature,
another attention) shows here first, while it still looks like off-policyness everywhere else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from realsys.config.schema import AgreementConfig

log = logging.getLogger(__name__)

PREFIX = "agreement/"  # of the statistics


class AgreementMonitor:
    """Judges each step by a threshold, and the course of steps by a trend. Steps without such tokens say nothing."""

    def __init__(self, config: AgreementConfig) -> None:
        self._config = config
        self._first: list[tuple[float, float]] = []  # (tokens, mean difference) of the first steps that had any
        self._last: deque[tuple[float, float]] = deque(maxlen=config.window)
        self._warning = ""

    def observe(self, version: int, stats: Mapping[str, float]) -> dict[str, Any]:
        """One step, trained on ``version``: what there is to show of it, with ``warning`` ("" if all is well).

        ``stats``: those of actor_inf. Numbers that do not exist, for want of tokens, are None.
        """
        found = {key.removeprefix(PREFIX): value for key, value in stats.items() if key.startswith(PREFIX)}
        tokens, mean = found.get("tokens", 0.0), found.get("difference_mean")
        warning = self._judge(tokens, mean) if mean is not None else ""
        self._tell(version, warning)
        return {
            "version": version,
            "tokens": int(tokens),
            "difference_mean": mean,
            "difference_max": found.get("difference_max"),
            "ratio": found.get("ratio"),
            "warning": warning,
        }

    def _judge(self, tokens: float, mean: float) -> str:
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

    def _tell(self, version: int, warning: str) -> None:
        """Once when it begins and once when it is over: a step's record has it every time."""
        if warning and not self._warning:
            log.warning("log-probs of engine and trainer disagree at version %d: %s", version, warning)
        elif self._warning and not warning:
            log.warning("log-probs of engine and trainer agree again at version %d", version)
        self._warning = warning


def _mean(steps: list[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Over tokens."""
    return sum(tokens * mean for tokens, mean in steps) / sum(tokens for tokens, _ in steps)

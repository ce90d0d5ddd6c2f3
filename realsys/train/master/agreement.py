"""Monitor of the agreement between generation engine and trainer on log-probs.

It compares tokens whose log-probs both computed with the same weights: those of the version that is
trained, and if the batch has none, those of an earlier version of which the trainer kept the weights.

    AgreementSampler ──SnapshotPlan──> actor_inf, or actor_train where nothing else scores the batch,
        before the first minibatch of a step
        ──``agreement/...`` statistics──> AgreementMonitor
        ──> step record, status page; a warning in the log when it drifts

Their difference is due to numerics only: kernels, precision, batch shapes. It enters every importance
weight. If an engine computes with wrong weights, another temperature or another attention, this is
the first statistic that shows it; all others look as they do with stale samples.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.model_calls import SnapshotPlan
from realsys.types import CONSTRAINED, SampleMeta

log = logging.getLogger(__name__)

PREFIX = "agreement/"  # prefix of the statistics
SAMPLE_TOKENS = 2048  # scored with kept weights: the mean is exact to a few percent, and takes no time to speak of
_WINDOW = 8  # steps in one mean: single batches differ by a factor of two
_GROWTH = 4.0  # of a mean since the first steps, above which it drifts
_FLOOR = 1e-4  # nats per token below which growth is numerical noise


class AgreementSampler:
    """Decides when the trainer keeps the weights of a version, and what it scores with them.

    In an asynchronous run the batch at version v has tokens of v - eta to v - 1. The weights of one version
    s are kept until a batch has tokens of s; these are scored, and the weights of that step are kept next.
    Tokens of v itself need no kept weights, and no plan if the step scores its whole batch (``scores_all``).
    """

    def __init__(self, eta: int, sample_tokens: int = SAMPLE_TOKENS, *, scores_all: bool = True) -> None:
        self._sample_tokens = sample_tokens
        self._scores_all = scores_all
        self._expiry = 2 * (eta + 1)  # steps after which no token of the kept version is expected any more
        self._kept: int | None = None

    def plan(self, version: int, samples: Sequence[SampleMeta]) -> SnapshotPlan | None:
        """Return what to score before the step that trains ``version``, and whether to keep its weights.

        ``samples``: those of data rank 0, which has the copy. Log-probs under a grammar are not compared.
        """
        if not self._sample_tokens:
            return None
        samples = [sample for sample in samples if not sample.metrics.get(CONSTRAINED)]
        if any(sample.version_max >= version for sample in samples):
            return None if self._scores_all else SnapshotPlan(version, self._select(version, samples))
        plan = SnapshotPlan()
        if self._kept is not None:
            plan.version, plan.samples = self._kept, self._select(self._kept, samples)
        if self._kept is None or plan.samples or version - self._kept > self._expiry:
            plan.take, self._kept = True, version
        return plan if plan.take else None

    def _select(self, version: int, samples: Sequence[SampleMeta]) -> list[str]:
        """Return samples with tokens of ``version``: as many as reach ``sample_tokens``, at least one."""
        selected, tokens = [], 0
        for sample in samples:
            if tokens < self._sample_tokens and sample.version_min <= version <= sample.version_max:
                selected.append(sample.sample_id)
                tokens += sample.loss_tokens
        return selected


class AgreementMonitor:
    """Compares each step with a threshold, and the last steps with the first ones.

    Steps without such tokens are skipped. ``threshold``: ``train.engine_check``; 0: no warnings.
    """

    def __init__(self, threshold: float, window: int = _WINDOW) -> None:
        self._threshold = threshold
        self._window = window
        self._first: list[tuple[float, float]] = []  # (tokens, mean difference) of the first steps that had any
        self._last: deque[tuple[float, float]] = deque(maxlen=window)
        self._warning = ""

    def observe(self, version: int, stats: Mapping[str, float]) -> dict[str, Any]:
        """Add one step, trained on ``version``; return its values to show, with ``warning`` ("" if all is well).

        ``stats``: statistics of the call that compared. Values are None if the step had no such tokens.
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
        if not self._threshold:
            return ""
        if len(self._first) < self._window:
            self._first.append((tokens, mean))
        else:
            self._last.append((tokens, mean))
        if not mean <= self._threshold:  # NaN warns, too
            return f"mean difference {mean:.2g} nats per token is over train.engine_check={self._threshold:g}"
        if len(self._last) < self._window:
            return ""
        before, now = _mean(self._first), _mean(self._last)
        if now > _GROWTH * max(before, _FLOOR):
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

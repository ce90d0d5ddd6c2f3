"""What a step's record says beside its statistics: warnings, increases of counts, rows of a held-out set."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from realsys.algorithm.token_losses import StepLosses
from realsys.config.evaluation_sets import DEMOS, id_of_set
from realsys.train.master.intake_decisions import TrainBatch
from realsys.train.master.step_statistics import Increase

log = logging.getLogger(__name__)

#: behaviour weight above which a step warns; a cap of 5 hides it from the loss
LARGE_WEIGHT = 100.0


class Onset:
    """Tells when a condition begins to hold."""

    def __init__(self) -> None:
        self._held = False

    def begins(self, holds: bool) -> bool:
        """Return True if the condition holds and did not hold at the last call."""
        before, self._held = self._held, holds
        return holds and not before


class StepWarnings:
    """Warnings of a run, each once when its condition begins to hold."""

    def __init__(self) -> None:
        self._waste, self._large_weights = Onset(), Onset()

    def of_waste(self, losses: StepLosses) -> None:
        """Warn once when staleness begins to cost many tokens, and again if it does so later."""
        if self._waste.begins(losses.warning):
            log.warning(
                "%.0f %% of the tokens sampled for the last steps were too old to be trained: increase "
                "asynchronous.max_staleness, or set asynchronous.stale_policy=train",
                100 * losses.too_old,
            )

    def of_weights(self, step: int, stats: Mapping[str, float]) -> None:
        """Warn once when behaviour weights become very large."""
        largest = stats.get("w_max", 0.0)
        if self._large_weights.begins(largest > LARGE_WEIGHT):
            log.warning(
                "step %d has a token with behaviour weight w = %.3g: the trainer's log-prob and the one recorded in "
                "generation are far apart; see agreement in the step log, and lower "
                "asynchronous.max_staleness if that is small",
                step,
                largest,
            )


class Increases:
    """Increases of the manager's counts from step to step. ``known`` False: it counted before this trainer started."""

    def __init__(self, *, known: bool = True) -> None:
        self.tokens = Increase(known=known)
        self.lengths = Increase(known=known)
        self.failures = Increase(known=known)
        self.filtered = Increase(known=known)


def joined(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Return the batches of a step as one."""
    if len(batches) == 1:
        return batches[0]
    return TrainBatch(
        groups=[group for batch in batches for group in batch.groups],
        dropped_stale=sum(batch.dropped_stale for batch in batches),
        refused=sum(batch.refused for batch in batches),
        masked=[sample for batch in batches for sample in batch.masked],
        oldest_trained=batches[-1].oldest_trained,
        losses=batches[-1].losses,
        rolled_out=batches[-1].rolled_out,
    )


def row_record(eval_id: str, step: int, lines: int, stats: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Return the step log's record of the held-out rows of a supervised run: the evaluation of a set of its own."""
    return {
        "kind": "eval",
        "time": time.time(),
        "eval_id": id_of_set(eval_id, DEMOS),
        "set": DEMOS,
        "step": step,
        "version": step,
        "complete": True,
        "problems": lines,
        "samples": 1,
        "failed": 0,
        "seconds": seconds,
        "accuracy": stats.get("accuracy"),
        "loss": stats["loss"],
    }

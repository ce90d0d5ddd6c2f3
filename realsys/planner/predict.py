"""Predicts the throughput of a configuration: simulations with the fitted costs, and an interval around them.

best costs  ──> simulations with several seeds ──> mid, chance ─┐
other costs ──> simulations with one seed ───────> costs ───────┼──> spread ──> 90 % interval
recorded run, as simulated with the best costs ──> misfit ──────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, variance

from realsys.config.schema import Config
from realsys.planner.cost_fit import MEMBERS
from realsys.planner.parameters import Fit, Parameters
from realsys.planner.steady_state import SHORT, STEPS, Outcome, check_layouts, simulate

SEEDS = (1, 2, 3)
PREDICT_SIMULATIONS = len(SEEDS) + 1 + MEMBERS
#: relative error of the model itself, where the costs are exact. The errors in benchmarks/results/planner.json have a
#: root mean square of 8 %, and the costs cause a part of it.
MODEL_ERROR = 0.07
_Z90 = 1.645


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and the bounds between which it is with a probability of 90 %."""

    mid: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return True if ``value`` is inside."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Prediction:
    """Steady state of one configuration: evaluations, checkpoints and the first steps are left out.

    tokens_per_s   completion tokens of the trained batches
    waits          share of the time in which the trainer waits for a batch
    """

    label: str
    config: Config
    steps_per_h: Interval
    tokens_per_s: Interval
    waits: float

    @property
    def bound(self) -> str:
        """Return which side limits the throughput."""
        return "generation" if self.waits > 0.1 else "training"


def predict(
    fit: Fit, config: Config, label: str = "", *, scale: float = 1.0, progress: Callable[[], None] = lambda: None
) -> Prediction:
    """Predict the throughput of ``config``.

    ``scale``: lengths of the completions over those of the recorded run. ``progress`` is called after each simulation.
    Raises ConfigError if the recorded run does not have the layouts of ``config``.
    """
    check_layouts(fit.recording.config, config)
    longest = config.generation.sampling.max_new_tokens
    lengths = replace(fit.lengths, scale=scale, longest=longest)

    def run(numbers: Parameters, seed: int, steps: int) -> Outcome:
        outcome = simulate(fit.costs(numbers), config, lengths, seed, steps)
        progress()
        return outcome

    mids = [run(fit.mid, seed, STEPS) for seed in SEEDS]
    short = run(fit.mid, SEEDS[0], SHORT).steps_per_h
    drawn = [run(numbers, SEEDS[0], SHORT).steps_per_h / short for numbers in fit.members]
    costs = mean(math.log(max(ratio, 1e-6)) ** 2 for ratio in drawn)
    chance = variance(math.log(max(outcome.steps_per_h, 1e-6)) for outcome in mids) / len(mids)
    spread = math.sqrt(costs + chance + fit.misfit**2 + MODEL_ERROR**2)
    return Prediction(
        label,
        config,
        _interval([outcome.steps_per_h for outcome in mids], spread),
        _interval([outcome.tokens_per_s for outcome in mids], spread),
        mean(outcome.waits for outcome in mids),
    )


def _interval(mids: list[float], spread: float) -> Interval:
    mid, factor = mean(mids), math.exp(_Z90 * spread)
    return Interval(mid, mid / factor, mid * factor)

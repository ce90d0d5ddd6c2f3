"""Predicts the throughput of a configuration: simulations with the fitted costs, and an interval around them.

best costs  ──> simulations with several seeds ──> mid, chance ─┐
other costs ──> simulations with one seed ───────> costs ───────┼──> spread ──> 90 % interval
recorded run, as simulated with the best costs ──> misfit ──────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, variance

from realsys.config.allocation import parse_allocation
from realsys.config.compose import with_overrides
from realsys.config.fields import replaced
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.lab.planner.cost_fit import MEMBERS
from realsys.lab.planner.parameters import Fit, Parameters
from realsys.lab.planner.steady_state import SHORT, STEPS, SteadyState, check_apart, check_layouts, simulate

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

    def run(numbers: Parameters, seed: int, steps: int) -> SteadyState:
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


# ---- splits of the devices between servers and trainer, and the choice among them


MOST_SPLITS = 7  # more are thinned out, evenly


def devices_of(config: Config) -> int:
    """Return the number of devices of ``config.allocation``. Raises ConfigError if servers take turns with ranks."""
    allocation = check_apart(config)
    return allocation.inference.world_size + allocation.workers


def splits(config: Config, devices: int) -> list[str]:
    """Return the allocations that put ``devices`` to use with the layouts of ``config.allocation``, few servers first.

    A server and a data rank of the trainer keep their size (tensor and pipeline parallelism); their numbers change. A
    batch must have an episode for each data rank. With several roles in the expression only the recorded one is left.
    """
    allocation = check_apart(config)
    if len(allocation.roles) > 1:
        return [config.allocation]
    server, rank = allocation.inference, allocation.actor
    rank_size = rank.pipeline * rank.tensor
    found = []
    for servers in range(1, devices // server.tensor + 1):
        ranks = (devices - servers * server.tensor) // rank_size
        if ranks >= 1:
            found.append(f"serve.d{servers}m{server.tensor}+d{ranks}p{rank.pipeline}m{rank.tensor}")
    return _thinned(found)


def _thinned(found: list[str]) -> list[str]:
    if len(found) <= MOST_SPLITS:
        return found
    last = len(found) - 1
    return [found[round(k * last / (MOST_SPLITS - 1))] for k in range(MOST_SPLITS)]


def recommend(predictions: Sequence[Prediction], devices: int = 0) -> Prediction:
    """Return the fastest prediction that needs at most ``devices``; 0: no limit.

    Of those that are as fast within a percent, the first.
    """
    fitting = [each for each in predictions if not devices or devices_of(each.config) <= devices]
    fastest = max(prediction.tokens_per_s.mid for prediction in fitting)
    return next(prediction for prediction in fitting if prediction.tokens_per_s.mid >= 0.99 * fastest)


# ---- variants of a configuration that the planner predicts: splits, batch sizes, bounds on staleness, lengths


_LIMIT = ("generation", "sampling", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration to predict. ``scale``: lengths of the completions over those of the recorded run."""

    label: str
    config: Config
    scale: float = 1.0


def split_variants(config: Config, devices: int, cores: float) -> list[Variant]:
    """Return the splits of the devices, the configuration's own first.

    With shared ``cores`` there may be a process more. Raises ConfigError if the devices are too few for every split.
    """
    found = splits(config, devices)
    if cores:
        found += [split for split in splits(config, devices + 1) if split not in found]
    own = Variant(f"allocation={config.allocation}", config)
    others = [Variant(f"allocation={split}", replaced(config, ["allocation"], split)) for split in found]
    same = _plain(config.allocation)
    variants = [own, *(other for other in others if _plain(other.config.allocation) != same)]
    if not cores and min(devices_of(variant.config) for variant in variants) > devices:
        problem = f"is too few for servers and ranks of the sizes in {config.allocation}: give more"
        raise ConfigError("--devices", devices, problem)
    return variants


def _plain(allocation: str) -> str:
    return str(parse_allocation(allocation))


def what_ifs(config: Config) -> list[Variant]:
    """Return neighbours of a configuration: half and twice the batch, other bounds on staleness, other lengths."""
    batch, eta = config.train.batch_groups, config.asynchronous.max_staleness
    found = [_changed(config, f"train.batch_groups={size}") for size in (batch // 2, 2 * batch) if size]
    found += [
        _changed(config, f"asynchronous.max_staleness={bound}")
        for bound in sorted({0, 1, max(2, eta // 2), 2 * eta} - {eta})
    ]
    return found + [scaled(config, factor) for factor in (0.5, 2.0)]


def scaled(config: Config, factor: float) -> Variant:
    """Return the configuration with completions ``factor`` times as long, and the limit on their length as well."""
    limit = max(1, round(factor * config.generation.sampling.max_new_tokens))
    return Variant(f"lengths x {factor:g}", replaced(config, _LIMIT, limit), factor)


def given(config: Config, texts: Sequence[str]) -> list[Variant]:
    """Return a variant for each text of overrides with spaces between them. Raises ConfigError."""
    return [Variant(text, with_overrides(config, text.split())) for text in texts]


def _changed(config: Config, override: str) -> Variant:
    return Variant(override, with_overrides(config, [override]))

"""Lengths of completions: drawn from a formula or from a recorded trial.

Every length is a quantile of a normal score z = sqrt(p) * prompt + sqrt(1 - p) * episode, where p is the
``prompt_share``. So the same prompt is long again when it is issued again, in any distribution.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.simulate.scenarios import LengthSettings
from realsys.train.records.record_files import read_record, recorded_steps
from realsys.types import Ticket


class Lengths:
    """Draws the lengths of a ticket's completions: a function of seed, prompt and the ticket's own seed."""

    def __init__(self, settings: LengthSettings, seed: int) -> None:
        """Raises ConfigError if a recorded trial has no records."""
        self._settings = settings
        self._seed = seed
        self._prompt = math.sqrt(settings.prompt_share)
        self._episode = math.sqrt(1.0 - settings.prompt_share)
        self._mu = math.log(settings.mean) - settings.sigma**2 / 2
        self._values = recorded_lengths(settings.trial) if settings.kind == "trial" else settings.values

    def draw(self, ticket: Ticket) -> list[int]:
        """Return the tokens of each of the ``ticket.n`` completions."""
        prompt = self._prompt * Random(self._seed << 32 | ticket.prompt_index).gauss(0.0, 1.0)
        gauss = Random(ticket.seed).gauss
        return [self._quantile(prompt + self._episode * gauss(0.0, 1.0)) for _ in range(ticket.n)]

    def _quantile(self, score: float) -> int:
        s = self._settings
        if s.kind == "lognormal":
            tokens = math.exp(self._mu + s.sigma * score)
        elif s.kind == "constant":
            tokens = s.mean
        else:
            below = 0.5 * math.erfc(-score / math.sqrt(2.0))
            if s.kind == "pareto":
                ratio = (s.shortest / s.longest) ** s.exponent
                tokens = s.shortest * (1.0 - below * (1.0 - ratio)) ** (-1.0 / s.exponent)
            elif s.kind == "uniform":
                tokens = s.shortest + below * (s.longest - s.shortest)
            else:
                tokens = self._values[min(int(below * len(self._values)), len(self._values) - 1)]
        return max(s.shortest, min(int(tokens), s.longest))


def recorded_lengths(trial: str) -> list[int]:
    """Return the sampled tokens of every episode in a trial's records, sorted. Raises ConfigError without records."""
    root = TrialPaths(Path(trial)).records
    episodes: dict[tuple[str, int, int], int] = {}
    for folder in recorded_steps(root).values():
        for sample in (sample for group in read_record(folder).groups for sample in group):
            key = sample.ticket_id, sample.attempt, sample.episode
            episodes[key] = sample.episode_tokens or sample.loss_tokens
    if not episodes:
        problem = f"no recorded step under {root}: run the trial with record.samples=true"
        raise ConfigError("sim.lengths.trial", trial, problem)
    return sorted(episodes.values())

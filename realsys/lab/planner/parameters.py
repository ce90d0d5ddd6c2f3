"""Costs of a recorded run: numbers with errors, and sets of numbers that all explain the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from realsys.config.allocation import parse_allocation
from realsys.lab.planner.recorded_run import Recording
from realsys.lab.planner.steady_state import Costs, LengthSample


@dataclass(frozen=True, slots=True)
class Cost:
    """One number of the cost model. ``error``: its standard error, in the same unit."""

    value: float
    error: float

    def draw(self, random: Random) -> float:
        """Return a value within the error; not negative."""
        return max(0.0, random.gauss(self.value, self.error))

    def draw_positive(self, random: Random) -> float:
        """Return a value within the error; never 0, because its logarithm is normally distributed."""
        sigma = math.sqrt(math.log1p((self.error / self.value) ** 2))
        return self.value * math.exp(random.gauss(0.0, sigma))

    def times(self, factor: float) -> Cost:
        """Return the cost multiplied by a number without error."""
        return Cost(self.value * factor, self.error * factor)

    def combined(self, other: Cost) -> Cost:
        """Return the mean of two independent estimates, weighted by their errors."""
        mine, its = 1 / max(self.error, 1e-12) ** 2, 1 / max(other.error, 1e-12) ** 2
        return Cost((mine * self.value + its * other.value) / (mine + its), (mine + its) ** -0.5)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Costs as the recording tells them, for a process that has its device to itself.

    token_s            seconds of a token while the mean number of completions is sampled
    fixed_token        share of token_s that does not grow with the number of completions
    group_s            seconds of a group besides sampling: reward, stream, calls
    forward_s          seconds per token of a forward pass without gradient: the cache after an update
    step_s             seconds of a step at the run's mean tokens, on its ranks
    fixed_step         share of step_s that does not grow with the tokens
    others             cores that the other processes use while the mean number is sampled
    scaling            the part of a step per token takes 1 / n^scaling of the time on n times as many data ranks
    """

    token_s: Cost
    fixed_token: Cost
    group_s: Cost
    forward_s: Cost
    step_s: Cost
    fixed_step: Cost
    others: Cost
    scaling: Cost

    def mid(self) -> Parameters:
        """Return the estimates without their errors."""
        return Parameters(*(getattr(self, name).value for name in self.__slots__))

    def draw(self, random: Random) -> Parameters:
        """Return numbers within the errors."""
        drawn = Parameters(*(getattr(self, name).draw(random) for name in self.__slots__))
        drawn.token_s, drawn.step_s = self.token_s.draw_positive(random), self.step_s.draw_positive(random)
        for share in ("fixed_token", "fixed_step", "scaling"):
            setattr(drawn, share, min(1.0, getattr(drawn, share)))
        return drawn


@dataclass(slots=True)
class Parameters:
    """The numbers of Estimates."""

    token_s: float
    fixed_token: float
    group_s: float
    forward_s: float
    step_s: float
    fixed_step: float
    others: float
    scaling: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A recorded run, and the costs that explain it.

    cores         shared by servers and ranks; 0: each server and rank has a device
    completions   mean number that a server samples at a time
    step_tokens   mean completion tokens of a batch
    update_s      seconds from the end of a step until a server samples with its weights
    mid           the costs; the simulation of the run agrees with the recording
    members       other costs within the errors, with which it agrees as well
    misfit        relative error of the simulated run's steps per hour with ``mid``
    """

    recording: Recording
    lengths: LengthSample
    cores: float
    completions: float
    step_tokens: float
    update_s: float
    estimates: Estimates
    mid: Parameters
    members: tuple[Parameters, ...] = ()
    misfit: float = 0.0

    def costs(self, numbers: Parameters) -> Costs:
        """Return the costs of a simulation."""
        layout = parse_allocation(self.recording.config.allocation)
        rate = layout.inference.data * self.completions / numbers.token_s
        return Costs(
            token=numbers.token_s * numbers.fixed_token,
            token_per_running=numbers.token_s * (1.0 - numbers.fixed_token) / self.completions,
            group=numbers.group_s,
            forward=numbers.forward_s,
            step=numbers.step_s * numbers.fixed_step,
            step_per_token=numbers.step_s * (1.0 - numbers.fixed_step) / self.step_tokens,
            ranks=layout.actor.data,
            scaling=numbers.scaling,
            cpu_per_token=numbers.others / rate if self.cores else 0.0,
            update=self.update_s,
            cores=self.cores,
        )

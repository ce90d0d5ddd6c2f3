"""Fits the costs of `realsys simulate` to one recorded run.

    Recording ──estimate──> Estimates ──mid────> corrected by simulations of the recorded run ──────> Fit.mid
                                      ──draws──> corrected likewise, each to a redrawn recorded run ──> Fit.members

A redrawn run has blocks of the recorded steps, drawn with return. So a short or uneven recording makes the intervals
wider.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np

from realsys.config.allocation import parse_allocation
from realsys.lab.planner.cost_estimates import estimate, load_of, redrawn, typical_lengths
from realsys.lab.planner.parameters import Fit, Parameters
from realsys.lab.planner.recorded_run import Recording, StepCost, steady
from realsys.lab.planner.steady_state import SHORT, STEPS, LengthSample, SteadyState, simulate

MEMBERS = 10  # further sets of costs
_CORRECTIONS, _SHORT_CORRECTIONS = 6, 3  # simulations of the recorded run that correct the best costs, and others
FIT_SIMULATIONS = _CORRECTIONS + MEMBERS * _SHORT_CORRECTIONS
_GROWTHS, _NO_CHANGE = (0.5, 4.0), 1e-3  # bounds of the measured growth; logarithm of a change that measures none
_QUANTILES = 2000  # lengths that represent all recorded ones
_WAITS = 0.05  # share of the time; a trainer that waits longer is bound by the servers


def fit(recording: Recording, cores: float, progress: Callable[[], None] = lambda: None) -> Fit:
    """Fit the costs. ``cores``: cores of the host that all processes share; 0: each process has a device.

    ``progress`` is called after each simulation.
    """
    load = load_of(recording)
    running = load.completions[load.completions > 0]
    servers = parse_allocation(recording.config.allocation).inference.data
    completions = max(1.0, float(running.mean()) / servers) if len(running) else 1.0
    estimates = estimate(recording, load, completions, cores)
    fitted = Fit(
        recording=recording,
        lengths=lengths_of(recording),
        cores=cores,
        completions=completions,
        step_tokens=float(np.mean([step.sampled for step in steady(recording)])),
        update_s=_update(recording),
        estimates=estimates,
        mid=estimates.mid(),
    )
    mid, misfit = _corrected(fitted, fitted.mid, recorded_outcome(recording), STEPS, _CORRECTIONS, progress)
    token, step, random = mid.token_s / fitted.mid.token_s, mid.step_s / fitted.mid.step_s, Random(1)
    members = []
    for _ in range(MEMBERS):
        begin = _scaled(estimates.draw(random), token, step)
        goal = recorded_outcome(recording, random)
        members.append(_corrected(fitted, begin, goal, SHORT, _SHORT_CORRECTIONS, progress)[0])
    return replace(fitted, mid=mid, members=tuple(members), misfit=misfit)


def recorded_outcome(recording: Recording, random: Random | None = None) -> SteadyState:
    """Return what a simulation of the recorded run should give; with ``random``, of a redrawn run."""
    steps = steady(recording)
    chosen: Any = np.arange(len(steps)) if random is None else redrawn(len(steps), random)
    waits = np.array([step.wait for step in steps])[chosen].sum()
    total = np.array([step.total for step in steps])[chosen].sum()
    groups = _groups_of(recording, steps)
    seconds = [group for k in chosen for group in groups[k]]
    return SteadyState(
        steps_per_h=3600 * len(chosen) / float(total),
        tokens_per_s=float(np.array([step.sampled for step in steps])[chosen].sum() / total),
        waits=float(waits / total),
        step_s=float((total - waits) / len(chosen)),
        group_s=float(np.mean(seconds or [group.seconds for group in recording.groups])),
    )


def _groups_of(recording: Recording, steps: Sequence[StepCost]) -> list[list[float]]:
    """Return for each step the seconds of the groups that ended since the step before it."""
    ends = [step.end for step in steps]
    groups: list[list[float]] = [[] for _ in ends]
    for group in recording.groups:
        if steps[0].begin < group.finished <= ends[-1]:
            groups[bisect_left(ends, group.finished)].append(group.seconds)
    return groups


def _corrected(
    fitted: Fit, numbers: Parameters, goal: SteadyState, most: int, times: int, progress: Callable[[], None]
) -> tuple[Parameters, float]:
    """Scale the costs of both sides until the simulated run agrees with ``goal``.

    Returns the costs that agree best, and the relative error of their steps per hour. The time of a group may grow
    faster than the costs of a server, because late groups share the servers with the next ones. So each change is
    divided by the growth that the change before it had.
    """
    best, growth, change, before = (math.inf, numbers, 0.0), 1.0, 0.0, 0.0
    for _ in range(times):
        outcome = simulate(fitted.costs(numbers), fitted.recording.config, fitted.lengths, most=most)
        progress()
        server, trainer = _missing(outcome, goal, told=fitted.recording.servers.tell_tokens)
        if abs(server) + abs(trainer) < best[0]:
            error = abs(math.log(outcome.steps_per_h / goal.steps_per_h))
            best = abs(server) + abs(trainer), numbers, error
        if abs(change) > _NO_CHANGE:
            growth = min(_GROWTHS[1], max(_GROWTHS[0], (before - server) / change))
        change, before = server / growth, server
        numbers = _scaled(numbers, math.exp(change), math.exp(trainer))
    return best[1], best[2]


def _missing(outcome: SteadyState, goal: SteadyState, *, told: bool) -> tuple[float, float]:
    """Return the logarithms of what the seconds of the servers and of the trainer must be multiplied with.

    The trainer's factor: mean seconds of a step. The servers' factor: steps per hour, if the trainer waits for them. If
    it does not wait, the throughput tells nothing about the servers. Then costs that were ``told`` by spans stay,
    because a group is slower while groups from the start of the run still wait. Without spans: mean seconds of a group.
    """
    if goal.waits > _WAITS and outcome.waits > _WAITS / 2:
        server = outcome.steps_per_h / goal.steps_per_h
    else:
        server = 1.0 if told else goal.group_s / max(outcome.group_s, 1e-9)
    return math.log(server), math.log(goal.step_s / max(outcome.step_s, 1e-9))


def _scaled(numbers: Parameters, server: float, trainer: float) -> Parameters:
    """Return the costs with those of a group and those of a step multiplied."""
    return replace(
        numbers,
        token_s=numbers.token_s * server,
        group_s=numbers.group_s * server,
        step_s=numbers.step_s * trainer,
    )


def _update(recording: Recording) -> float:
    """Return the shortest usual time from the end of a step to the first group that its weights sample."""
    ends = np.array([step.end for step in recording.steps])
    grants = np.sort([group.granted for group in recording.groups])
    if not len(grants):
        return 0.0
    after = np.searchsorted(grants, ends)
    waits = [float(grants[k] - end) for k, end in zip(after, ends, strict=True) if k < len(grants)]
    return float(np.percentile(waits, 25)) if waits else 0.0


def lengths_of(recording: Recording) -> LengthSample:
    """Return the lengths, with the share of their variance that the prompts decide."""
    groups = [lengths for lengths in recording.lengths if len(lengths) > 1]
    longest = recording.config.generation.sampling.max_new_tokens
    if not groups:
        return LengthSample(typical_lengths(recording), 1.0, recording.prompt_tokens, longest)
    values = np.array([length for lengths in groups for length in lengths], dtype=float)
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2) / len(values)  # equal lengths have the same rank
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks])[places]
    bounds = np.cumsum([len(lengths) for lengths in groups])[:-1]
    within = float(np.mean([part.var(ddof=1) for part in np.split(scores, bounds)]))
    share = min(1.0, max(0.0, 1.0 - within / max(float(scores.var()), 1e-12)))
    drawn = np.sort(values)
    if len(drawn) > _QUANTILES:  # the middles of equal parts, because the longest is rarer than a part
        drawn = np.quantile(drawn, (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    return LengthSample(tuple(max(1, round(float(value))) for value in drawn), share, recording.prompt_tokens, longest)

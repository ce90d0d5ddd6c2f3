"""Fits the costs of `realsys simulate` to one recorded run.

Recording ──estimate──> Estimates ──mid, draws──> simulation of the recorded run ──> corrected costs ──> Fit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import NormalDist

import numpy as np

from realsys.config.allocation import parse_allocation
from realsys.planner.cost_estimates import estimate, steady
from realsys.planner.load import load_of, typical_lengths
from realsys.planner.parameters import Fit, Parameters
from realsys.planner.recorded_run import Recording
from realsys.planner.steady_state import STEPS, Lengths, Outcome, simulate

MEMBERS = 10  # further sets of costs
_CORRECTIONS = 4  # simulations of the recorded run that correct the best costs
_SHORT, _SHORT_CORRECTIONS = 12, 2  # steps and simulations for each other set
_QUANTILES = 2000  # points that stand for the recorded lengths
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
        lengths=_lengths(recording),
        cores=cores,
        completions=completions,
        step_tokens=float(np.mean([step.sampled for step in steady(recording)])),
        update_s=_update(recording),
        estimates=estimates,
        mid=estimates.mid(),
    )
    mid = _corrected(fitted, fitted.mid, STEPS, _CORRECTIONS, progress)
    token, step = mid.token_s / fitted.mid.token_s, mid.step_s / fitted.mid.step_s
    members, random = [], Random(1)
    for _ in range(MEMBERS):
        drawn = estimates.draw(random)
        drawn.token_s, drawn.step_s = drawn.token_s * token, drawn.step_s * step
        members.append(_corrected(fitted, drawn, _SHORT, _SHORT_CORRECTIONS, progress))
    return replace(fitted, mid=mid, members=tuple(members))


def recorded_outcome(recording: Recording) -> Outcome:
    """Return what a simulation of the recorded run should give."""
    steps = steady(recording)
    total = sum(step.total for step in steps)
    return Outcome(
        steps_per_h=3600 * len(steps) / total,
        tokens_per_s=sum(step.sampled for step in steps) / total,
        waits=sum(step.wait for step in steps) / total,
        step_s=float(np.mean([step.busy + step.rest for step in steps])),
        group_s=float(np.mean([group.seconds for group in recording.groups if group.granted > steps[0].begin])),
    )


def _corrected(fitted: Fit, numbers: Parameters, steps: int, times: int, progress: Callable[[], None]) -> Parameters:
    """Scale the costs of both sides until the simulated run agrees with the recorded one.

    The trainer's: in the mean seconds of a step's computation. The servers': in the steps per hour, if the trainer
    waits for them; in the mean seconds of a group, if it does not, because then they do not decide the throughput.
    """
    recorded = recorded_outcome(fitted.recording)
    for _ in range(times):
        outcome = simulate(fitted.costs(numbers), fitted.recording.config, fitted.lengths, steps=steps)
        progress()
        server = recorded.group_s / max(outcome.group_s, 1e-9)
        if recorded.waits > _WAITS and outcome.waits > _WAITS / 2:
            server = outcome.steps_per_h / recorded.steps_per_h
        trainer = recorded.step_s / max(outcome.step_s, 1e-9)
        numbers = replace(numbers, token_s=numbers.token_s * server, step_s=numbers.step_s * trainer)
    return numbers


def _update(recording: Recording) -> float:
    """Return the shortest usual time from the end of a step to the first group that its weights sample."""
    ends = np.array([step.end for step in recording.steps])
    grants = np.sort([group.granted for group in recording.groups])
    if not len(grants):
        return 0.0
    after = np.searchsorted(grants, ends)
    waits = [float(grants[k] - end) for k, end in zip(after, ends, strict=True) if k < len(grants)]
    return float(np.percentile(waits, 25)) if waits else 0.0


def _lengths(recording: Recording) -> Lengths:
    """Return the lengths, with the share of their variance that the prompts decide."""
    groups = [lengths for lengths in recording.lengths if len(lengths) > 1]
    longest = recording.config.generation.sampling.max_new_tokens
    if not groups:
        return Lengths(typical_lengths(recording), 1.0, recording.prompt_tokens, longest)
    values = np.array([length for lengths in groups for length in lengths], dtype=float)
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = (np.arange(len(values)) + 0.5) / len(values)
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks])
    bounds = np.cumsum([len(lengths) for lengths in groups])[:-1]
    within = float(np.mean([part.var(ddof=1) for part in np.split(scores, bounds)]))
    share = min(1.0, max(0.0, 1.0 - within / float(scores.var())))
    quantiles = np.quantile(values, np.linspace(0.0, 1.0, min(len(values), _QUANTILES)))
    drawn = tuple(max(1, round(float(value))) for value in quantiles)
    return Lengths(drawn, share, recording.prompt_tokens, longest)

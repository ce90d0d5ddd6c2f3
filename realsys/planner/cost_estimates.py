"""Estimates the costs of a recorded run by least squares.

    groups: seconds ~ length x completions that run  ──> server
    steps:  seconds ~ trained tokens                 ──> trainer
    both, while the other side works or waits        ──> cores that they share

Where the run does not separate two costs, an assumption with a wide error takes part (``PRIORS``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realsys.config.allocation import parse_allocation
from realsys.planner.load import Load, typical_lengths
from realsys.planner.parameters import Cost, Estimates
from realsys.planner.recorded_run import FEWEST_STEPS, Recording, StepCost
from realsys.planner.regression import errors_of, non_negative
from realsys.planner.steady_state import recomputes, trainer_cores

SKIP = 2  # first steps: the pipeline fills, and kernels are warmed up
#: share of a token's and of a step's time that does not grow with the batch; cores of the other processes per server;
#: exponent of the trainer's speed over the number of its data ranks
PRIORS = {
    "fixed_token": Cost(0.4, 0.25),  # reading the weights, on a GPU
    "fixed_token_on_cpu": Cost(0.1, 0.1),  # arithmetic takes longer than reading (benchmarks/generation.py)
    "fixed_step": Cost(0.15, 0.15),
    "others": Cost(0.3, 0.2),
    # A run has one number of ranks. On verl's page (published/) update_actor of the same batch takes 269.80, 133.41 and
    # 113.81 s on 32, 64 and 128 GPUs. So the exponent was 1.02, then 0.23: their mean and standard deviation.
    "scaling": Cost(0.62, 0.39),
}
_OTHERS = np.linspace(0.0, 1.5, 31)  # cores per server that are tried
_FASTEST = 1e-9  # seconds of a token, if the time of the groups does not depend on their lengths
_LIKE_A_STEP = 0.3  # relative error of the engine's forward pass, which is taken to be that of the trainer


def estimate(recording: Recording, load: Load, completions: float, cores: float) -> Estimates:
    """Estimate the costs. ``completions``: mean number on a server; ``cores`` as in Fit."""
    forward = _forward(recording)
    token, fixed_token, group, others = _server(recording, load, completions, cores, forward.value)
    busy = slowdowns(recording, cores, others.value)[1]
    step, fixed_step = _trainer(recording, load, busy)
    return Estimates(token, fixed_token, group, forward.times(1 / busy), step, fixed_step, others, PRIORS["scaling"])


def slowdowns(recording: Recording, cores: float, others: float) -> tuple[float, float]:
    """Return by how much the servers are slower than alone, while the trainer waits and while it computes."""
    if not cores:
        return 1.0, 1.0
    allocation = parse_allocation(recording.config.allocation)
    servers = allocation.inference.data * recording.config.generation.threads + others
    ranks = trainer_cores(recording.config, allocation)
    return max(1.0, servers / cores), max(1.0, (servers + ranks) / cores)


def steady(recording: Recording) -> list[StepCost]:
    """Return the steps after those that fill the pipeline, and before those of which all groups were granted.

    The last steps of a run have no generation next to them, so they are faster than its steady state.
    """
    last = max((group.granted for group in recording.groups), default=recording.steps[-1].end)
    filled = recording.config.asynchronous.max_head_offpolicyness + 2  # a simulation leaves out the same steps
    found = [step for step in recording.steps[filled:] if step.end <= last]
    return found if len(found) >= FEWEST_STEPS // 2 else recording.steps[SKIP:]


# -- server ------------------------------------------------------------------------------------------------------------


def _server(
    recording: Recording, load: Load, completions: float, cores: float, forward_s: float
) -> tuple[Cost, Cost, Cost, Cost]:
    """Return the time of a token alone, its fixed share, the time of a group, and the cores of the other processes.

    seconds of a group = group + longest x (fixed + each x running) x slowdown + recomputed
    """
    servers = parse_allocation(recording.config.allocation).inference.data
    groups = [group for group in recording.groups if group.granted >= load.begin]
    groups = [group for group in groups if group.lengths] or groups
    longest = np.array([max(group.lengths or typical_lengths(recording)) for group in groups], dtype=float)
    times = [(group.granted, group.finished) for group in groups]
    running = np.array([load.mean(load.completions, *span) for span in times]) / servers
    training = np.array([load.mean(load.training, *span) for span in times])
    recomputed = np.array([_recomputed(recording, load, *span) for span in times]) * forward_s / servers
    seconds = np.array([group.seconds for group in groups])
    target = np.maximum(0.0, seconds - recomputed)
    weights = 1.0 / (seconds + np.median(seconds))
    tried = _OTHERS * servers if cores else np.zeros(1)

    def estimate(chosen: Any) -> Any:
        best: Any = None
        for others in tried:
            idle, busy = slowdowns(recording, cores, float(others))
            factor = longest * (idle + (busy - idle) * training)
            columns = np.stack([factor, factor * running, np.ones_like(factor)], axis=1) * weights[:, None]
            fixed, each, group = non_negative(columns[chosen], (target * weights)[chosen])
            error = float(np.square(columns[chosen] @ [fixed, each, group] - (target * weights)[chosen]).sum())
            token = max(fixed + each * completions, _FASTEST)
            if best is None or error < best[0]:
                best = error, np.array([token, fixed / token, group, others])
        return best[1]

    values, errors = errors_of(len(groups), estimate)
    token, fixed, group, others = (Cost(float(v), float(e)) for v, e in zip(values, errors, strict=True))
    spread = float(running.std() / max(running.mean(), 1e-9))
    fixed = Cost(fixed.value, max(fixed.error, 0.05 / max(spread, 0.05)))  # alike loads do not tell
    if cores:
        others = Cost(others.value, max(others.error, 0.1)).combined(PRIORS["others"].times(servers))
    prior = PRIORS["fixed_token_on_cpu" if cores else "fixed_token"]
    return token, fixed.combined(prior), group, others


def _recomputed(recording: Recording, load: Load, begin: float, end: float) -> float:
    """Return the cached tokens that updates between two times computed again."""
    if not recomputes(recording.config):
        return 0.0
    ends = (step.end for step in recording.steps)
    return sum(float(load.cached[load.moment(time)]) for time in ends if begin < time < end)


# -- trainer -----------------------------------------------------------------------------------------------------------


def _trainer(recording: Recording, load: Load, busy: float) -> tuple[Cost, Cost]:
    """Return the seconds of a step alone, at the mean tokens, and its fixed share.

    ``busy``: how much slower it computes while the servers sample.
    """
    steps = recording.steps[SKIP:]
    trained = np.array([step.trained for step in steps], dtype=float)
    active = [load.mean(load.completions > 0, step.begin + step.wait, step.end) for step in steps]
    slower = 1.0 + (busy - 1.0) * np.array(active)
    seconds = np.array([step.busy + step.rest for step in steps]) / slower

    def estimate(chosen: Any) -> Any:
        columns = np.stack([np.ones(len(chosen)), trained[chosen]], axis=1)
        fixed, each = non_negative(columns, seconds[chosen])
        step = fixed + each * trained.mean()
        return np.array([step, fixed / max(step, 1e-12)])

    values, errors = errors_of(len(steps), estimate)
    step, fixed = (Cost(float(v), float(e)) for v, e in zip(values, errors, strict=True))
    return step, Cost(fixed.value, max(fixed.error, 0.05)).combined(PRIORS["fixed_step"])


def _forward(recording: Recording) -> Cost:
    """Return the seconds per token of a forward pass on one rank, as the trainer's inference takes them."""
    steps = steady(recording)
    ranks = parse_allocation(recording.config.allocation).actor.data
    seconds = float(np.median([step.inference / max(1, step.trained) for step in steps])) * ranks
    return Cost(seconds, _LIKE_A_STEP * seconds)

"""Estimates the costs of a recorded run by least squares.

    servers: seconds ~ tokens x completions that run (``server_estimates``)  ──> server
    steps:   seconds ~ trained tokens                                        ──> trainer
    both, while the other side works or waits                                ──> cores that they share

Where the run does not separate two costs, an assumption with a wide error takes part (``PRIORS``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

import numpy as np

from realsys.config.allocation import parse_allocation
from realsys.lab.planner.parameters import Cost, Estimates
from realsys.lab.planner.recorded_run import SKIP, GroupTime, Recording, steady
from realsys.lab.planner.steady_state import recomputes, trainer_cores


def estimate(recording: Recording, load: RecordedLoad, completions: float, cores: float) -> Estimates:
    """Estimate the costs. ``completions``: mean number on a server; ``cores`` as in Fit."""
    server = estimate_server(recording, load, completions, cores)
    step, fixed_step = _trainer(recording, load, slowdowns(recording, cores, server.others.value)[1])
    return Estimates(
        server.token,
        server.fixed_token,
        server.group,
        server.forward,
        step,
        fixed_step,
        server.others,
        PRIORS["scaling"],
    )


def _trainer(recording: Recording, load: RecordedLoad, busy: float) -> tuple[Cost, Cost]:
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


# ---- estimates the costs of the servers of a recorded run
#
#     decode spans: seconds ~ tokens x completions that decode ──┐
#     without them: groups: seconds ~ length x completions ──────┼──> seconds of a token, cores of the other processes
#     spans of the servers, caches computed again ───────────────┴──> seconds of a recomputed token
#     times of the groups without those of the servers ─────────────> seconds of a group
#
# Spans tell more: a group takes as long as its longest completion, and does not say when the others ended.


_OTHERS = np.linspace(0.0, 1.5, 31)  # cores per server that are tried
_FASTEST = 1e-9  # seconds of a token, if the times do not depend on the lengths
_LIKE_A_STEP = 0.3  # relative error of the engine's forward pass, if it is taken to be that of the trainer
_RECOMPUTING = 0.01  # share of the decoding; less does not tell what a recomputed token takes


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Costs as in Estimates."""

    token: Cost
    fixed_token: Cost
    group: Cost
    forward: Cost
    others: Cost


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of sampling, a number of each: seconds ~ tokens x (fixed + each x running) x slowdown + a x extra.

    training   share of a piece's time in which the trainer computed
    extra      what takes time besides its tokens, with an unknown factor ``a``
    """

    seconds: Any
    tokens: Any
    running: Any
    training: Any
    extra: Any


def estimate_server(recording: Recording, load: RecordedLoad, completions: float, cores: float) -> ServerCosts:
    """Estimate the costs. ``completions``: mean number on a server; ``cores`` as in Fit."""
    servers = parse_allocation(recording.config.allocation).inference.data
    prior = PRIORS["fixed_token_on_cpu" if cores else "fixed_token"]
    forward, told = _trainers_forward(recording), _decoded(recording, load)
    pieces = _groups(recording, load, forward.value / servers) if told is None else told
    tried = _OTHERS * servers if cores else np.zeros(1)

    def estimate(chosen: Any) -> Any:
        found = (_least_squares(recording, cores, pieces, chosen, float(others)) for others in tried)
        _, (fixed, each, extra), others = min(found, key=lambda solution: solution[0])
        token = max(fixed + each * completions, _FASTEST)
        return np.array([token, fixed / token, extra if told is None else min(extra, 1.0), others])

    values, errors = errors_of(len(pieces.seconds), estimate)
    token, fixed, extra, others = (Cost(float(v), float(e)) for v, e in zip(values, errors, strict=True))
    spread = float(pieces.running.std() / max(pieces.running.mean(), 1e-9))
    fixed = Cost(fixed.value, max(fixed.error, 0.05 / max(spread, 0.05)))  # alike loads do not tell
    if cores:
        others = Cost(others.value, max(others.error, 0.1)).combined(PRIORS["others"].times(servers))
    if told is None:
        busy = slowdowns(recording, cores, others.value)[1]
        return ServerCosts(token, fixed.combined(prior), extra, forward.times(1 / busy), others)
    again = _recomputed_token(recording, load, cores, extra, others.value) if told.extra.any() else None
    busy = slowdowns(recording, cores, others.value)[1]
    return ServerCosts(token, fixed.combined(prior), _rest(recording), again or forward.times(1 / busy), others)


def slowdowns(recording: Recording, cores: float, others: float) -> tuple[float, float]:
    """Return by how much the servers are slower than alone, while the trainer waits and while it computes."""
    if not cores:
        return 1.0, 1.0
    allocation = parse_allocation(recording.config.allocation)
    servers = allocation.inference.data * recording.config.cluster.threads + others
    ranks = trainer_cores(recording.config, allocation)
    return max(1.0, servers / cores), max(1.0, (servers + ranks) / cores)


def _slowdown(recording: Recording, cores: float, others: float, training: Any) -> Any:
    idle, busy = slowdowns(recording, cores, others)
    return idle + (busy - idle) * training


def _least_squares(
    recording: Recording, cores: float, pieces: _Pieces, chosen: Any, others: float
) -> tuple[float, Any, float]:
    """Return (squared error, (fixed, each, a), ``others``) of the ``chosen`` pieces. Relative errors count."""
    weights = 1.0 / (pieces.seconds[chosen] + np.median(pieces.seconds))
    factor = pieces.tokens[chosen] * _slowdown(recording, cores, others, pieces.training[chosen])
    columns = np.stack([factor, factor * pieces.running[chosen], pieces.extra[chosen]], axis=1) * weights[:, None]
    target = pieces.seconds[chosen] * weights
    solution = non_negative(columns, target)
    return float(np.square(columns @ solution - target).sum()), solution, others


# ---- with spans


def _decoded(recording: Recording, load: RecordedLoad) -> _Pieces | None:
    """Return the decode spans; None without enough of them. Extra: seconds in which caches are computed again."""
    found = recording.servers.decoding
    if not recording.servers.tell_tokens:
        return None
    seconds, extra = np.array([each.end - each.begin for each in found]), np.array([each.recomputing for each in found])
    return _Pieces(
        seconds=seconds,
        tokens=np.array([each.tokens for each in found], dtype=float),
        running=np.array([each.running for each in found]),
        training=np.array([load.mean(load.training, each.begin, each.end) for each in found]),
        extra=extra if extra.sum() > _RECOMPUTING * seconds.sum() else np.zeros(len(found)),
    )


def _recomputed_token(recording: Recording, load: RecordedLoad, cores: float, share: Cost, others: float) -> Cost:
    """Return the seconds of a recomputed token alone.

    ``share``: of the time in which caches are computed again; completions that are ready decode in the rest.
    """
    found = recording.servers.recomputes
    training = np.array([load.mean(load.training, each.begin, each.end) for each in found])
    seconds = np.array([each.end - each.begin for each in found]) / _slowdown(recording, cores, others, training)
    tokens = np.array([each.tokens for each in found], dtype=float)
    value, error = errors_of(len(found), lambda chosen: seconds[chosen].sum() / max(1.0, tokens[chosen].sum()))
    part = min(1.0, share.value)
    return Cost(float(value) * part, float(np.hypot(error * part, value * share.error)))


def _rest(recording: Recording) -> Cost:
    """Return the seconds of a group besides those in which a server has it."""
    served = recording.servers.served
    groups = [group for group in recording.groups if (group.ticket_id, group.attempt) in served]
    spans = [served[group.ticket_id, group.attempt] for group in groups]
    rest = np.array(
        [max(0.0, group.seconds - (end - begin)) for group, (begin, end) in zip(groups, spans, strict=True)]
    )
    if not len(rest):
        return Cost(0.0, 0.0)
    value, error = errors_of(len(rest), lambda chosen: rest[chosen].mean())
    return Cost(float(value), float(error))


# ---- without spans


def _groups(recording: Recording, load: RecordedLoad, forward_s: float) -> _Pieces:
    """Return the groups, with the tokens of their longest completions. Extra: 1 for each.

    ``forward_s``: seconds of a recomputed token, of all servers together. The time of recomputed caches is taken away.
    """
    servers = parse_allocation(recording.config.allocation).inference.data
    groups = [group for group in recording.groups if group.granted >= load.begin]
    groups = [group for group in groups if group.lengths] or groups
    seconds = [group.seconds - forward_s * _recomputed(recording, load, group) for group in groups]
    times = [(group.granted, group.finished) for group in groups]
    return _Pieces(
        seconds=np.maximum(0.0, seconds),
        tokens=np.array([max(group.lengths or typical_lengths(recording)) for group in groups], dtype=float),
        running=np.array([load.mean(load.completions, *span) for span in times]) / servers,
        training=np.array([load.mean(load.training, *span) for span in times]),
        extra=np.ones(len(groups)),
    )


def _recomputed(recording: Recording, load: RecordedLoad, group: GroupTime) -> float:
    """Return the cached tokens that updates during a group computed again."""
    if not recomputes(recording.config):
        return 0.0
    ends = (step.end for step in recording.steps)
    return sum(float(load.cached[load.moment(time)]) for time in ends if group.granted < time < group.finished)


def _trainers_forward(recording: Recording) -> Cost:
    """Return the seconds per token of a forward pass on one rank, as the trainer's inference takes them."""
    ranks = parse_allocation(recording.config.allocation).actor.data
    seconds = float(np.median([step.inference / max(1, step.trained) for step in steady(recording)])) * ranks
    return Cost(seconds, _LIKE_A_STEP * seconds)


# ---- assumptions about costs that one run does not tell, with wide errors


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


# ---- least squares with numbers that cannot be negative, and errors from blocks of time


Matrix = Any
BLOCKS = 8  # neighbours are alike, so whole blocks are drawn
DRAWS = 30
_EQUAL = 1e-9  # relative difference of squared errors that rounding makes


def non_negative(columns: Matrix, target: Matrix) -> Matrix:
    """Return the factors of ``columns`` [n, k] with the least squared error at ``target`` [n]; none is negative.

    All subsets of the columns are tried, so the result is exact and does not depend on units. ``k`` must be small. If
    several subsets explain ``target`` equally well, the one with the fewest columns is taken, then the earliest one.
    """
    count = columns.shape[1]
    sizes = np.sqrt(np.square(columns).sum(axis=0))
    scaled = columns / np.maximum(sizes, 1e-300)
    products, projections = scaled.T @ scaled, scaled.T @ target
    best, factors = 0.0, np.zeros(count)
    for chosen in (list(kept) for size in range(1, count + 1) for kept in combinations(range(count), size)):
        solution = np.linalg.lstsq(products[np.ix_(chosen, chosen)], projections[chosen], rcond=1e-10)[0]
        explained = float(projections[chosen] @ solution)  # squared target minus squared error
        if (solution >= 0).all() and explained > best * (1.0 + _EQUAL):
            best, factors = explained, np.zeros(count)
            factors[chosen] = solution
    return factors / np.maximum(sizes, 1e-300)


def redrawn(count: int, random: Random) -> Matrix:
    """Return indexes of ``count`` observations as another record might have them: whole blocks, drawn with return."""
    blocks = np.array_split(np.arange(count), min(BLOCKS, count))
    return np.concatenate(random.choices(blocks, k=len(blocks)))


def errors_of(count: int, estimate: Callable[[Matrix], Matrix], seed: int = 1) -> tuple[Matrix, Matrix]:
    """Return the estimate from all ``count`` observations, and its standard error from redrawn blocks.

    ``estimate`` gets the indexes of the observations to use.
    """
    random = Random(seed)
    drawn = [estimate(redrawn(count, random)) for _ in range(DRAWS)]
    return estimate(np.arange(count)), np.std(np.array(drawn), axis=0)


# ---- load of a recorded run at each moment: completions that run, tokens in the cache, trainer at work
#
# A completion is taken to be sampled at an even rate, and the longest one of a group until the group ends. So the
# others end at their share of the group's time.


Series = Any  # an array with one number per moment
_MOMENTS_PER_GROUP = 40  # moments in the median time of a group
_MOST_MOMENTS = 200_000


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Series over the time of the recorded steps, at moments ``grid`` seconds apart.

    completions   completions that run on all servers
    cached        tokens that they have sampled so far
    training      1 while the trainer computes, else 0
    """

    begin: float
    grid: float
    completions: Series
    cached: Series
    training: Series

    def moment(self, time: float) -> int:
        """Return the index of the moment at ``time``."""
        return int(min(max(0.0, (time - self.begin) / self.grid), len(self.training) - 1))

    def mean(self, series: Series, begin: float, end: float) -> float:
        """Return the mean of a series between two times."""
        first = self.moment(begin)
        return float(series[first : max(first + 1, self.moment(end))].mean())


def load_of(recording: Recording) -> RecordedLoad:
    """Return the load of a recorded run."""
    steps, groups = recording.steps, recording.groups
    begin, end = steps[0].begin, steps[-1].end
    median = float(np.median([group.seconds for group in groups])) if groups else 1.0
    grid = max(median / _MOMENTS_PER_GROUP, (end - begin) / _MOST_MOMENTS, 1e-4)
    moments = int((end - begin) / grid) + 2
    load = RecordedLoad(begin, grid, np.zeros(moments), np.zeros(moments), np.zeros(moments))
    typical = typical_lengths(recording)
    for group in groups:
        _add(load, group, group.lengths or typical)
    for step in steps:
        first = load.moment(step.begin + step.wait)
        load.training[first : max(first + 1, load.moment(step.begin + step.wait + step.busy))] = 1.0
    return load


def typical_lengths(recording: Recording) -> tuple[int, ...]:
    """Return the lengths of a group that no record has: the mean of each place, in ascending order."""
    ordered = [sorted(lengths) for lengths in recording.lengths]
    if not ordered:
        rows = recording.config.train.batch_groups * recording.config.rollout.group_size
        mean = sum(step.sampled for step in recording.steps) / len(recording.steps) / rows
        return (max(1, round(mean)),) * recording.config.rollout.group_size
    size = min(map(len, ordered))
    return tuple(max(1, round(float(np.mean([lengths[k] for lengths in ordered])))) for k in range(size))


def _add(load: RecordedLoad, group: GroupTime, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    for length in lengths:
        end = group.granted + group.seconds * length / longest
        if end <= load.begin:
            continue
        first, last = load.moment(group.granted), load.moment(end) + 1
        load.completions[first:last] += 1.0
        before = length * max(0.0, load.begin - group.granted) / (end - group.granted)
        load.cached[first:last] += np.linspace(before, length, last - first)

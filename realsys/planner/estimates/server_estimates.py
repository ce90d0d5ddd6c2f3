"""Estimates the costs of the servers of a recorded run.

    decode spans: seconds ~ tokens x completions that decode ──┐
    without them: groups: seconds ~ length x completions ──────┼──> seconds of a token, cores of the other processes
    spans of the servers, caches computed again ───────────────┴──> seconds of a recomputed token
    times of the groups without those of the servers ─────────────> seconds of a group

Spans tell more: a group takes as long as its longest completion, and does not say when the others ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from realsys.config.allocation import parse_allocation
from realsys.planner.estimates.priors import PRIORS
from realsys.planner.estimates.regression import errors_of, non_negative
from realsys.planner.load import Load, typical_lengths
from realsys.planner.parameters import Cost
from realsys.planner.recorded_run import GroupTime, Recording, steady
from realsys.planner.steady_state import recomputes, trainer_cores

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


def estimate_server(recording: Recording, load: Load, completions: float, cores: float) -> ServerCosts:
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
    servers = allocation.inference.data * recording.config.generation.threads + others
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


# -- with spans --------------------------------------------------------------------------------------------------------


def _decoded(recording: Recording, load: Load) -> _Pieces | None:
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


def _recomputed_token(recording: Recording, load: Load, cores: float, share: Cost, others: float) -> Cost:
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


# -- without spans -----------------------------------------------------------------------------------------------------


def _groups(recording: Recording, load: Load, forward_s: float) -> _Pieces:
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


def _recomputed(recording: Recording, load: Load, group: GroupTime) -> float:
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

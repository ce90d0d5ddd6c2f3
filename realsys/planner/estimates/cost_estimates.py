"""Estimates the costs of a recorded run by least squares.

    servers: seconds ~ tokens x completions that run (``server_estimates``)  ──> server
    steps:   seconds ~ trained tokens                                        ──> trainer
    both, while the other side works or waits                                ──> cores that they share

Where the run does not separate two costs, an assumption with a wide error takes part (``PRIORS``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realsys.planner.estimates.priors import PRIORS
from realsys.planner.estimates.regression import errors_of, non_negative
from realsys.planner.estimates.server_estimates import estimate_server, slowdowns
from realsys.planner.load import Load
from realsys.planner.parameters import Cost, Estimates
from realsys.planner.recorded_run import SKIP, Recording


def estimate(recording: Recording, load: Load, completions: float, cores: float) -> Estimates:
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

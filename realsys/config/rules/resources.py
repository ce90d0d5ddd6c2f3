"""Estimates of the disk that a trial needs, from the sizes of its models. Lower bounds, not forecasts.

disk     kept weight versions, kept checkpoints and one being written, the trained model
"""

from __future__ import annotations

from realsys.config.allocation import ACTOR
from realsys.config.dataflow import Dataflow
from realsys.config.memory.models import batch_tokens, model_of
from realsys.config.schema import Config

_FP32, _MOMENTS = 4, 8  # bytes per parameter
_RECORD_TOKEN_BYTES = 24  # tokens, log-probs, versions and mask of one recorded token


def disk_bytes(config: Config, flow: Dataflow) -> int:
    """Estimate what the trial folder holds in the end, without records. Raises ModelError."""
    actor, state = _sizes(config, flow)
    settings = config.checkpoint
    versions = config.weights.keep_versions + 2  # one is being written; one is the trained model
    if settings.hf_every_steps:
        versions += config.train.total_steps // settings.hf_every_steps
    checkpoints = settings.keep + 1 if settings.every_steps else int(settings.at_end or settings.on_stop)
    return versions * actor + checkpoints * state


def step_bytes(config: Config, flow: Dataflow) -> int:
    """Estimate the most that one step writes: a weight version and a checkpoint. Raises ModelError."""
    actor, state = _sizes(config, flow)
    return actor + (state if config.checkpoint.every_steps else 0)


def _sizes(config: Config, flow: Dataflow) -> tuple[int, int]:
    """Return the bytes of a weight version and of a checkpoint."""
    weight = 2 if config.model.dtype == "bfloat16" else 4
    trained = dict.fromkeys([*([ACTOR] if config.warmup.steps else []), *flow.trained_roles])
    state = sum(model_of(config, role).parameters for role in trained) * (_FP32 + _MOMENTS)
    return model_of(config).parameters * weight, state


def record_bytes(config: Config) -> int:
    """Estimate the records of the kept steps if every episode has the longest row."""
    steps = min(config.record.keep_steps, config.train.total_steps)
    return steps * batch_tokens(config) * _RECORD_TOKEN_BYTES if config.record.samples else 0

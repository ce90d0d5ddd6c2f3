"""Estimates of the memory and the disk that a trial needs, from the sizes of its models. Lower bounds, not forecasts.

rank     weights + gradients + fp32 master + two moments of Adam, for each trained role; weights alone for the others
         + the logits of one micro-batch + a copy of its share of the actor's weights, which is written while it trains
server   the served weights, and the next version while it is loaded
disk     kept weight versions, kept checkpoints and one being written, the trained model
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realsys.config.allocation import ACTOR, Allocation
from realsys.config.dataflow import Dataflow
from realsys.config.roles import role_settings
from realsys.config.rules.lengths import longest_sequence
from realsys.config.rules.machine import Machine
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.hf.config import read_model

GIB = 1 << 30
_TORCH_PROCESS_BYTES = 600 << 20  # resident memory of a process that has imported torch and Megatron
_LIGHT_PROCESS_BYTES = 120 << 20
_FP32, _MOMENTS = 4, 8  # bytes per parameter
_TINY_VOCABULARY = 48
_RECORD_TOKEN_BYTES = 24  # tokens, log-probs, versions and mask of one recorded token


@dataclass(frozen=True, slots=True)
class Model:
    """Numbers of one model that its memory depends on."""

    parameters: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, summed over all processes of a kind. ``logits`` is a part of ``ranks``."""

    ranks: int
    servers: int
    logits: int


def model_of(config: Config, role: str = ACTOR) -> Model:
    """Count the parameters of a role's model. Raises ModelError."""
    settings = role_settings(config, role)
    if settings.path:
        model = read_model(Path(settings.path), settings.head)
        return Model(model.parameters, model.vocab)
    tiny = config.model.tiny
    query, key_value = tiny.num_attention_heads * tiny.head_dim, tiny.num_key_value_heads * tiny.head_dim
    layer = tiny.hidden_size * (2 * query + 2 * key_value + 3 * tiny.intermediate_size)
    embeddings = (1 if tiny.tie_word_embeddings else 2) * _TINY_VOCABULARY * tiny.hidden_size
    return Model(tiny.num_hidden_layers * layer + embeddings, _TINY_VOCABULARY)


def memory_of_models(config: Config, allocation: Allocation, flow: Dataflow) -> Memory:
    """Estimate what the models take, over all ranks and servers. Raises ModelError."""
    weight = 2 if config.model.dtype == "bfloat16" else 4
    master = _FP32 if weight < _FP32 else 0
    ranks = 0
    for role in dict.fromkeys([ACTOR, *flow.roles]):
        count, layout = model_of(config, role).parameters, allocation.placement(role).layout
        settings = role_settings(config, role)
        is_trained = role in flow.trained_roles or (role == ACTOR and config.warmup.steps > 0)
        if not is_trained or settings.lora.rank:
            # Under an adapter the frozen weight is there twice: alone, and with the adapter.
            ranks += layout.data * count * weight * (2 if is_trained else 1)
            continue
        copies = 1 if config.train.distributed_optimizer else layout.data
        ranks += layout.data * count * (weight + _FP32) + copies * count * (master + _MOMENTS)
    actor = model_of(config)
    logits = allocation.actor.data * _logit_tokens(config, allocation) * actor.vocabulary * _FP32
    ranks += actor.parameters * weight  # each tensor is copied by one rank
    return Memory(ranks + logits, allocation.inference.data * 2 * actor.parameters * weight, logits)


def _logit_tokens(config: Config, allocation: Allocation) -> int:
    """Return for how many tokens a rank holds logits in a full micro-batch."""
    per_rank = batch_tokens(config) // allocation.actor.data
    tokens = min(max(config.train.microbatch_tokens, config.train.inference_microbatch_tokens), per_rank)
    return min(tokens, config.train.head_chunk_tokens or tokens)


def batch_tokens(config: Config) -> int:
    """Return the tokens of a train step whose episodes all have the longest row."""
    return config.train.batch_groups * config.rollout.group_size * longest_sequence(config)


def process_bytes(ranks: int, servers: int, others: int) -> int:
    """Return what the processes take before they load a model."""
    return (ranks + servers) * _TORCH_PROCESS_BYTES + others * _LIGHT_PROCESS_BYTES


def check_memory(config: Config, machine: Machine, need: int, models: Memory | None = None) -> None:
    """Refuse a trial that needs more host memory than is free. Raises ConfigError.

    ``need``: bytes without models; ``models`` None: they are not known yet.
    """
    total = need + (models.ranks + models.servers if models else 0)
    if total <= machine.memory_bytes:
        return
    free = f"{machine.memory_bytes / GIB:.1f} GiB are free"
    if models is None or need > machine.memory_bytes:
        raise ConfigError("allocation", config.allocation, f"its processes need about {need / GIB:.1f} GiB, {free}")
    parts = f"{models.ranks / GIB:.1f} for training, {models.servers / GIB:.1f} for generation, {need / GIB:.1f} else"
    problem = f"the run needs about {total / GIB:.1f} GiB of memory ({parts}), {free}"
    if models.logits > models.ranks / 2 and total - models.logits <= machine.memory_bytes:
        chunk = config.train.head_chunk_tokens
        problem += f"; {models.logits / GIB:.1f} of them are logits: set train.head_chunk_tokens=1024"
        raise ConfigError("train.head_chunk_tokens", chunk, problem)
    raise ConfigError("allocation", config.allocation, f"{problem}: use a smaller model or fewer ranks and servers")


# ---- disk


def disk_bytes(config: Config, flow: Dataflow) -> int:
    """Estimate what the trial folder holds in the end, without records. Raises ModelError."""
    weight = 2 if config.model.dtype == "bfloat16" else 4
    actor = model_of(config).parameters * weight
    settings = config.checkpoint
    versions = config.weights.keep_versions + 2  # one is being written; one is the trained model
    if settings.hf_every_steps:
        versions += config.train.total_steps // settings.hf_every_steps
    trained = dict.fromkeys([*([ACTOR] if config.warmup.steps else []), *flow.trained_roles])
    state = sum(model_of(config, role).parameters for role in trained) * (_FP32 + _MOMENTS)
    checkpoints = settings.keep + 1 if settings.every_steps else int(settings.at_end or settings.on_stop)
    return versions * actor + checkpoints * state


def record_bytes(config: Config) -> int:
    """Estimate the records of the kept steps if every episode has the longest row."""
    steps = min(config.record.keep_steps, config.train.total_steps)
    return steps * batch_tokens(config) * _RECORD_TOKEN_BYTES if config.record.samples else 0

"""Sizes that follow from the configuration: the longest sequence, the models of the roles, and the disk of a trial.

The longest sequence limits the engines' context, the models' positions and the micro-batches.
"""

from __future__ import annotations

from pathlib import Path

from realsys.config.allocation import ACTOR, has_servers
from realsys.config.dataflow import Dataflow, role_settings
from realsys.config.doors import AGENT
from realsys.config.schema import Config, DataConfig
from realsys.errors import ConfigError
from realsys.model_files.architecture import HfModel, Rope, vocabulary_size
from realsys.model_files.config_json import read_model

DEFAULT_PROMPT = int(DataConfig.model_fields["max_prompt_tokens"].default)
_FP32, _MOMENTS = 4, 8  # bytes per parameter
_RECORD_TOKEN_BYTES = 24  # tokens, log-probs, versions and mask of one recorded token


# ---- sequences


def longest_sequence(config: Config) -> int:
    """Return the tokens of the longest row that the agent of ``rollout.agent`` can make. Raises ConfigError."""
    agent, arguments = config.rollout.agent, config.rollout.agent_args
    # An agent that runs in another interpreter cannot be imported here.
    longest_row = None if config.rollout.agent_python else getattr(AGENT.load(agent), "longest_row", None)
    if longest_row is None:
        shortest = config.data.max_prompt_tokens + config.generation.sampling.max_new_tokens
        return config.rollout.agent_limits.max_tokens or shortest
    with AGENT.guard(agent, "longest_row raised"):
        try:
            longest = longest_row(config, **arguments)
        except TypeError as error:
            raise ConfigError("rollout.agent_args", arguments, f"do not fit {agent}: {error}") from None
    if type(longest) is not int or longest < 1:
        raise ConfigError("rollout.agent", agent, f"longest_row must return a number of tokens, not {longest!r}")
    return longest


def lengths_that_fit(positions: int, prompt: int = DEFAULT_PROMPT) -> tuple[int, int]:
    """Split the positions of a model into (prompt tokens, new tokens): at most a quarter of them for the prompt."""
    prompt = max(1, min(prompt, positions // 4))
    return prompt, max(1, positions - prompt)


def batch_tokens(config: Config) -> int:
    """Return the tokens of a train step whose episodes all have the longest row."""
    return config.train.batch_groups * config.rollout.trained_episodes * longest_sequence(config)


# ---- models


def model_of(config: Config, role: str = ACTOR) -> HfModel:
    """Return the model of ``role``. Raises ModelError."""
    settings = role_settings(config, role)
    if settings.path:
        return read_model(Path(settings.path), settings.head)
    tiny = config.model.tiny
    return HfModel(
        family="qwen2",
        vocab=vocabulary_size(chat=tiny.chat),
        hidden=tiny.hidden_size,
        ffn=tiny.intermediate_size,
        layers=tiny.num_hidden_layers,
        heads=tiny.num_attention_heads,
        kv_heads=tiny.num_key_value_heads,
        head_dim=tiny.head_dim,
        positions=tiny.max_position_embeddings,
        norm_eps=1e-6,
        rope=Rope(10000.0),
        tied=tiny.tie_word_embeddings and settings.head == "lm",
        qkv_bias=True,
        qk_norm=False,
        head=settings.head,
        has_score=False,
        eos=(),
    )


# ---- disk: lower bounds, not forecasts


def disk_bytes(config: Config, flow: Dataflow) -> int:
    """Estimate what the trial folder holds in the end, without records. Raises ModelError.

    These are kept weight versions, kept checkpoints and one being written, and the trained model. Without servers only
    the version of the trained model is written.
    """
    actor, state = _sizes(config, flow)
    settings = config.checkpoint
    versions = (
        config.weights.keep_versions if has_servers(config) else 0
    ) + 2  # one is being written; one is the trained model
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
    return steps * batch_tokens(config) * _RECORD_TOKEN_BYTES

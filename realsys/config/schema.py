"""The typed configuration of a trial: every field with its bound and its description.

compose.py composes it from YAML files and the command line. Workers never compose: they read the resolved dump
(`config.json` in the trial folder). `make docs` writes the descriptions into docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from realsys.config.fields import (
    Name,
    NonNegative,
    OpenProbability,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    Temperature,
)
from realsys.config.schema_cluster import ClusterConfig, TelemetryConfig
from realsys.config.schema_data import ArithConfig as ArithConfig
from realsys.config.schema_data import DataConfig as DataConfig
from realsys.config.schema_data import EvalConfig as EvalConfig
from realsys.config.schema_rollout import AgentLimitsConfig as AgentLimitsConfig
from realsys.config.schema_rollout import RolloutConfig
from realsys.config.schema_train import (
    CheckpointConfig,
    OptimizerConfig,
    PPOConfig,
    RecordConfig,
    RoleConfig,
    TrainConfig,
    with_built_in_roles,
)
from realsys.errors import ConfigError


class TinyModelConfig(Section):
    """Arguments of the tiny model, a random Qwen2 with a character tokenizer."""

    hidden_size: Positive = Field(128, description="width of the residual stream")
    num_hidden_layers: Positive = Field(2, description="number of layers")
    num_attention_heads: Positive = Field(4, description="query heads per layer")
    num_key_value_heads: Positive = Field(2, description="key and value heads per layer; must divide the query heads")
    head_dim: Positive = Field(32, description="width of one attention head")
    intermediate_size: Positive = Field(256, description="inner width of the feed-forward part")
    max_position_embeddings: Positive = Field(512, description="longest sequence in tokens")
    tie_word_embeddings: bool = Field(False, description="use the embedding matrix as output layer too")
    chat: bool = Field(False, description="one token per byte, and a chat template with tool calls (Qwen's marks)")


class ModelConfig(Section):
    """The model that is trained."""

    path: str = Field("", description="HF directory (Qwen2, Qwen3, Llama, Mistral); empty: make the tiny model")
    tiny: TinyModelConfig = Field(
        TinyModelConfig(), description="sizes of the model that is made if path is empty (docs/data.md)"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the parameters of every role")
    small_on_gpu: bool = Field(
        False,
        description="the model is small: allow float32 on GPUs, whose attention takes memory with the square of the"
        " length, and the embedded engine, which has neither CUDA graphs nor a paged KV cache",
    )
    head_dtype: Literal["model", "float32"] = Field(
        "model",
        description="dtype of the logits, in training and on the servers: model.dtype, or float32 (docs/models.md)",
    )


class PenaltyConfig(Section):
    """Penalties of tokens that the completion contains."""

    repetition: Annotated[float, Field(ge=1e-3, le=2)] = Field(
        1.0, description="divides positive, multiplies negative logits; 1: off"
    )
    presence: Annotated[float, Field(ge=-2, le=2)] = Field(0.0, description="subtracted from the logit; 0: off")
    frequency: Annotated[float, Field(ge=-2, le=2)] = Field(
        0.0, description="subtracted from the logit once per occurrence; 0: off"
    )


class SamplingConfig(Section):
    """Sampling of tokens. Log-probs are those of softmax(logits / temperature), without cuts and penalties.

    A call of an agent may have another temperature (``rollout.gateway.sampling``); its tokens are scored at that one.
    """

    temperature: Temperature = Field(1.0, description="divides the logits")
    top_p: OpenProbability = Field(1.0, description="sample from the most probable tokens with this sum; 1: off")
    top_k: int = Field(-1, ge=-1, description="sample from this number of most probable tokens; -1: off")
    min_p: Probability = Field(
        0.0, description="cut tokens less probable than this share of the most probable one; 0: off"
    )
    penalties: PenaltyConfig = Field(
        PenaltyConfig(),
        description="repetition (1: off), presence and frequency (0: off) penalties of tokens that the completion"
        " contains (docs/generation.md)",
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="texts that end a completion")
    stop_token_ids: list[NonNegative] = Field([], description="token ids that end a completion, besides end of text")
    max_new_tokens: Positive = Field(27648, description="longest completion in tokens")
    min_new_tokens: NonNegative = Field(0, description="tokens before a completion may end")
    new_tokens_per_chunk: NonNegative = Field(
        0, description="tokens that one request generates; a completion takes several requests; 0: one request"
    )


class EmbeddedConfig(Section):
    """The embedded engine: continuous batching in torch."""

    max_running: Positive = Field(64, description="sequences that are decoded together")
    max_queued: Positive = Field(8192, description="sequences that wait in one server; more are refused")
    context_length: NonNegative = Field(
        0, description="tokens per sequence; 0: the longest sequence that the agent can make"
    )
    cache_rows: NonNegative = Field(
        0,
        description="sequences that have room in the KV cache in addition to max_running. Rows of sequences that have "
        "ended serve the next turns of their conversations until running ones need them. If left open, and the agent "
        "has several turns: chosen for the episodes that wait, in a quarter of the memory that is left",
    )


class SglangConfig(Section):
    """SGLang's own server, in a child process of each GenerationServer."""

    python: str = Field(
        "",
        description="interpreter that has sglang; empty: this one, or without GPUs that of .venv-sglang if it exists",
    )
    args: dict[str, Any] = Field(
        {}, description="options of SGLang's command line; true: the flag without a value, false: leave the flag out"
    )
    start_timeout_s: PositiveFloat = Field(
        600.0, description="seconds that SGLang may take to start and load the model"
    )
    silence_timeout_s: float = Field(
        180.0, ge=30, description="seconds without a token, while requests wait, after which SGLang is restarted"
    )


class GenerationConfig(Section):
    """The engine that samples completions."""

    backend: str = Field(
        "embedded", description="`embedded`, `sglang`, `vllm`, or package.module:Class (docs/extending.md)"
    )
    backend_args: dict[str, Any] = Field({}, description="keyword arguments of the backend class")
    sampling: SamplingConfig = SamplingConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: SglangConfig = SglangConfig()
    progress_s: PositiveFloat = Field(
        2.0, description="seconds of sampling that the death of a server can cost: it sends new tokens this often"
    )


class AsyncConfig(Section):
    """Asynchrony (paper, sections 4 and 5)."""

    max_staleness: NonNegative = Field(
        4, description="eta: versions that generation may run ahead of training; 0: synchronous"
    )
    stale_policy: Literal["train", "mask", "drop"] = Field(
        "train",
        description="tokens older than max_staleness versions: train them, mask them out of the loss, or drop their "
        "group and issue its prompt again",
    )
    interruptible: bool = Field(
        True, description="update weights in the middle of completions; false: wait until they have ended"
    )
    kv_on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="cached keys and values at a weight update: drop and recompute them under the new weights, or keep"
        " them, so that completions continue on keys of older versions",
    )
    kv_reuse_versions: NonNegative = Field(
        0,
        description="with kv_on_update=keep: a request may use cached keys of an earlier one, such as the turn before, "
        "if they are at most that many versions older than the weights; 0: only keys of the same version",
    )


class ManagerConfig(Section):
    """The GserverManager: admission, routing, weight updates and ledger."""

    port: NonNegative = Field(0, description="TCP port of API and status page; 0: any free port")
    routing: Literal["round_robin", "least_requests", "least_tokens", "sticky", "prefix"] = Field(
        "sticky", description="strategy that chooses the server of a request (docs/manager.md)"
    )
    weight_update_mode: Literal["all_at_once", "rolling"] = Field(
        "all_at_once", description="update all servers together, or half of them at a time"
    )
    update_timeout_s: PositiveFloat = Field(600.0, description="seconds that one server may take for one weight update")
    rollout_lease_s: PositiveFloat = Field(
        3600.0, description="seconds without news of its RolloutWorker after which a running ticket is reissued"
    )
    ledger_compact_mb: PositiveFloat = Field(
        64.0, description="size in MiB above which a snapshot replaces the ledger file; older history is removed"
    )


class WeightsConfig(Section):
    """Weight versions on their way from the trainer to the servers (docs/weights.md)."""

    transport: str = Field(
        "disk", description="how versions reach the servers: disk, memory, group, or package.module:Class"
    )
    transport_args: dict[str, Any] = Field({}, description="keyword arguments of the transport class")
    keep_versions: Annotated[int, Field(ge=1)] = Field(
        2, description="newest versions kept on disk, with the older files that they refer to"
    )
    delta: Literal["off", "auto"] = Field(
        "off",
        description="auto: store only the changed elements of a tensor if that is smaller;"
        " trainer ranks then hold a copy of their share in host memory",
    )
    storage_readers: NonNegative = Field(
        0,
        description="hosts that read a version from the shared storage at a time; the others read it over HTTP"
        " from hosts that have it; 0: all read the storage; if left open, 2 for servers on four or more nodes",
    )


class WarmupConfig(Section):
    """Supervised phase before reinforcement, run by the same ModelWorkers."""

    steps: NonNegative = Field(0, description="supervised steps; 0: no warm-up")
    batch: Positive = Field(64, description="demonstrations per step")
    optimizer: OptimizerConfig = Field(
        OptimizerConfig(
            lr=3e-3, beta2=0.98, eps=1e-8, weight_decay=0.01, schedule="linear", min_lr_ratio=0.05, warmup_fraction=0.12
        ),
        description="optimizer of the warm-up: the fields of train.optimizer, with other defaults",
    )


class Config(Section):
    """One trial."""

    experiment: Name = Field("math", description="name of the experiment, and of the folder of its trials")
    trial: Name = Field("trial", description="name of this run; `realsys run` takes the time of the start")
    fileroot: str = Field("runs", description="folder of all trials: {fileroot}/{experiment}/{trial}")
    seed: NonNegative = Field(1, description="seed of data, sampling and the tiny model's weights")
    allocation: str = Field(
        "serve.d1p1m1+d1p1m1",
        description="inference + training parallelism, side by side or in turn, or auto; docs/allocation.md",
    )
    recover: Literal["auto", "resume", "off"] = Field(
        "auto", description="if a trial of this name exists: continue it; resume: it must exist, off: it must not"
    )
    resume: str = Field(
        "", description="another trial to continue from, in any layout: its folder, or one of its checkpoints"
    )
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    manager: ManagerConfig = ManagerConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    roles: Annotated[dict[Name, RoleConfig], AfterValidator(with_built_in_roles)] = Field(
        default_factory=lambda: with_built_in_roles({}),
        description="models other than the actor by the names of their roles: ref, critic, reward, and those that your"
        " dataflow calls",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    warmup: WarmupConfig = WarmupConfig()
    evaluation: EvalConfig = EvalConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def evaluate_only(self) -> bool:
        """True for a trial of `realsys eval`: it serves the model and evaluates it, without ModelWorkers."""
        return self.train.loop == "evaluate"

    @property
    def is_service(self) -> bool:
        """True for a trial of `realsys serve`: clients train and sample, and there are no agents."""
        return self.train.loop == "serve"

    def with_ppo(self, settings: Mapping[str, Any]) -> Config:
        """Return this configuration with other values of ``train.ppo``, by field. Raises ConfigError."""
        if unknown := settings.keys() - PPOConfig.model_fields.keys():
            raise ConfigError(f"train.ppo.{min(unknown)}", settings[min(unknown)], "unknown field")
        try:
            ppo = PPOConfig.model_validate({**self.train.ppo.model_dump(), **settings})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, ("train.ppo", *first["loc"])))
            raise ConfigError(field, first["input"], first["msg"]) from None
        return self.model_copy(update={"train": self.train.model_copy(update={"ppo": ppo})})

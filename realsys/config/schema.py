"""The typed configuration of a trial: every field with its bound. Composition is in compose.py.

Workers never compose: they read the resolved dump (`config.json` in the trial folder).
Names follow the AReaL paper where it has one (eta is ``max_head_offpolicyness``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from realsys.config.fields import Name, NonNegative, OpenProbability, Positive, PositiveFloat, Probability, Section
from realsys.config.schema_train import (
    CheckpointConfig,
    OptimizerConfig,
    RecordConfig,
    RolesConfig,
    TrainConfig,
)


class NameStoreConfig(Section):
    backend: Literal["file", "etcd"] = "file"
    address: str = Field("127.0.0.1:2379", description="host:port of etcd")
    start: bool = Field(False, description="start an etcd of this run's own at that address, and restart it")
    root: str = Field("", description="directory of the file backend; empty: {trial folder}/name_store")


class ClusterConfig(Section):
    name_store: NameStoreConfig = NameStoreConfig()
    host: str = Field("127.0.0.1", description="address the workers bind to and advertise")
    heartbeat_s: PositiveFloat = 2.0
    lease_s: PositiveFloat = 20.0
    connect_timeout_s: PositiveFloat = Field(120.0, description="bound on every wait for another worker at start")
    request_timeout_s: PositiveFloat = Field(
        1800.0, description="bound on one model function call, and on handing a group over"
    )
    stop_timeout_s: PositiveFloat = Field(8.0, description="a stopping run kills what is left after this")
    max_restarts: NonNegative = Field(5, description="restarts in a row, of a stateless worker or of the training side")
    log_mb: PositiveFloat = Field(
        16.0, description="a longer log of a process is moved to .log.1, in the place of what was there before"
    )

    @property
    def master_stop_s(self) -> float:
        """What the MasterWorker has of ``stop_timeout_s`` for its last checkpoint; the others stop after it."""
        return max(self.stop_timeout_s / 2, self.stop_timeout_s - 3.0)


class TinyModelConfig(Section):
    """A random Qwen2 made on the spot, with a character tokenizer, when ``model.path`` is empty."""

    hidden_size: Positive = 128
    num_hidden_layers: Positive = 2
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    head_dim: Positive = 32
    intermediate_size: Positive = 256
    max_position_embeddings: Positive = 512
    tie_word_embeddings: bool = False


class ModelConfig(Section):
    path: str = Field("", description="HF directory (Qwen2, Qwen3, Llama, Mistral); empty: make the tiny model")
    tiny: TinyModelConfig = TinyModelConfig()
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the parameters, for every role")


class ArithConfig(Section):
    """Running sums written out step by step; answer lengths have a heavy tail (P(n) ~ n^-alpha)."""

    min_operands: Annotated[int, Field(ge=2, le=26)] = 2
    max_operands: Annotated[int, Field(ge=2, le=26)] = 20
    alpha: float = 1.5
    max_operand: Positive = 9
    train_size: Positive = 20000
    eval_size: Positive = 1024
    demo_size: NonNegative = Field(27000, description="demonstrations for the supervised warm-up")
    demo_noise: Probability = Field(0.15, description="probability that a demonstrated step's sum is wrong")
    second_tries: Probability = Field(
        0.0, description="share of demonstrations with a wrong first try, feedback, and the problem solved again"
    )
    feedback: str = Field(
        "", description="text between the two tries, as the agent multi_turn writes it; {prompt}: the problem"
    )


class DataConfig(Section):
    kind: Literal["arith", "jsonl"] = "jsonl"
    train: str = Field("", description="JSONL with prompt and answer")
    eval: str = Field("", description="JSONL of held-out problems; empty: eval_fraction of train")
    eval_fraction: Probability = 0.05
    demos: str = Field("", description="JSONL with prompt and response, for the supervised warm-up")
    max_prompt_tokens: Positive = 1024
    chat_template: bool = Field(True, description="wrap prompts in the tokenizer's chat template if it has one")
    verifier: str = Field("math", description="a name in docs/data.md, or package.module:function")
    arith: ArithConfig = ArithConfig()


class SamplingConfig(Section):
    """What is sampled. Log-probs stay those of softmax(logits / temperature): cuts and penalties are not in them."""

    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    top_p: OpenProbability = 1.0
    top_k: int = Field(-1, ge=-1, description="-1: off")
    min_p: Probability = Field(0.0, description="tokens below this share of the most probable one's are cut; 0: off")
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=2)] = Field(
        1.0, description="divides (if negative: multiplies) the logits of tokens the answer holds already; 1: off"
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        0.0, description="taken off the logit of each token the answer holds already; 0: off"
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = Field(
        0.0, description="the same, times how often it holds the token; 0: off"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="texts that end an answer")
    stop_token_ids: list[NonNegative] = Field([], description="tokens that end an answer, beside the end of text")
    max_new_tokens: Positive = 27648
    min_new_tokens: NonNegative = 0
    new_tokens_per_chunk: NonNegative = Field(
        0, description="an answer is asked for in pieces of at most so many tokens; 0: in one"
    )


class EmbeddedConfig(Section):
    """The embedded engine: continuous batching in torch."""

    max_running: Positive = Field(64, description="sequences decoded together")
    max_queued: Positive = 8192
    context_length: NonNegative = Field(0, description="tokens per sequence; 0: prompt + answer limits")
    prefill_tokens: Annotated[int, Field(ge=64)] = Field(
        1024, description="prompt tokens computed between two decoding steps: bounds how long running answers wait"
    )


class SglangConfig(Section):
    """SGLang's own server, in a child process of each GenerationServer."""

    python: str = Field("", description="interpreter that has sglang; empty: .venv-sglang of the checkout, or this one")
    args: dict[str, Any] = Field({}, description="options of SGLang's command line; true: the flag alone, false: not")
    max_answers: Positive = Field(8192, description="answers that run and wait in one server; more are refused")
    start_timeout_s: PositiveFloat = Field(600.0, description="bound on the start of SGLang, with loading the model")
    max_restarts: NonNegative = Field(5, description="restarts in a row of a SGLang that died or hung")
    silence_timeout_s: float = Field(
        180.0, ge=30, description="a SGLang that samples nothing for so long, though asked to, is killed and restarted"
    )


class GenerationConfig(Section):
    backend: str = Field("embedded", description="`embedded`, `sglang`, or package.module:Class (docs/extending.md)")
    backend_args: dict[str, Any] = Field({}, description="keyword arguments of a class of your own")
    sampling: SamplingConfig = SamplingConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: SglangConfig = SglangConfig()
    request_timeout_s: PositiveFloat = 3600.0
    threads: Positive = Field(1, description="torch threads of a server on CPU")


class RewardConfig(Section):
    processes: Positive = Field(1, description="verifier processes per RolloutWorker")
    timeout_s: PositiveFloat = 10.0
    correct: float = 5.0
    wrong: float = -5.0


class RolloutConfig(Section):
    workers: Positive = 2
    group_size: Positive = Field(16, description="episodes per prompt")
    min_episodes: NonNegative = Field(
        0, description="a group is trained if so many of its episodes succeeded; 0: all of group_size"
    )
    max_concurrent: Positive = Field(64, description="running groups per RolloutWorker")
    agent: str = Field("single_turn", description="single_turn, multi_turn, or package.module:Class")
    agent_args: dict[str, Any] = Field({}, description="keyword arguments of the agent")
    environment: str = Field("verifier", description="verifier, or package.module:Class")
    environment_args: dict[str, Any] = Field({}, description="keyword arguments of the environment")
    max_attempts: Positive = Field(3, description="attempts of one ticket before it is dropped")
    reward: RewardConfig = RewardConfig()


class AsyncConfig(Section):
    """The knobs of asynchrony (paper, section 4 and 5)."""

    max_head_offpolicyness: NonNegative = Field(4, description="eta")
    stale_policy: Literal["drop", "train"] = "drop"
    interruptible: bool = Field(True, description="update weights in the middle of answers; else drain first")


class AgreementConfig(Section):
    """When the log-probs of generation engine and trainer, for the same weights, are reported as drifting apart."""

    max_difference: PositiveFloat = Field(
        0.05, description="mean absolute difference per token, in nats, above which a step warns"
    )
    max_growth: Annotated[float, Field(gt=1)] = Field(
        4.0, description="a step warns when the mean of the last ``window`` steps is this many times that of the first"
    )
    window: Positive = Field(8, description="steps that a trend is judged by")
    floor: PositiveFloat = Field(1e-4, description="nats; a trend below this is numerical noise")


class ManagerConfig(Section):
    port: NonNegative = Field(0, description="0: any free port")
    routing: Literal["round_robin", "least_requests", "least_tokens", "sticky", "prefix"] = "sticky"
    weight_update_mode: Literal["all_at_once", "rolling"] = Field(
        "all_at_once", description="new weights go to every server at once, or to some at a time"
    )
    rolling_fraction: OpenProbability = Field(
        0.5, description="of the serving servers, at least one: how many update at a time in the rolling mode"
    )
    rolling_retry_timeout_s: PositiveFloat = Field(
        30.0, description="a server that updates for longer no longer holds the others up"
    )
    update_timeout_s: PositiveFloat = 600.0
    rollout_lease_s: PositiveFloat = Field(3600.0, description="a running ticket without news is re-issued after this")
    ledger_compact_mb: PositiveFloat = Field(
        64.0, description="a larger ledger file is replaced by a snapshot of its state; the history before it is gone"
    )


class WeightsConfig(Section):
    """Weight versions, from the trainer to the servers; docs/weights.md."""

    transport: str = Field("disk", description="how versions reach the servers: disk, or package.module:Class")
    transport_args: dict[str, Any] = Field({}, description="keyword arguments of the transport's class")
    keep_versions: Annotated[int, Field(ge=1)] = Field(
        2, description="newest versions kept on disk, with what they refer to"
    )
    delta: Literal["off", "auto"] = Field(
        "off",
        description="auto: store only the changed elements of a tensor where that is less;"
        " trainer and servers each hold a copy of the weights in host memory for it",
    )
    full_every: Positive = Field(8, description="with delta: a changing tensor is whole in one of so many versions")


class WarmupConfig(Section):
    """Supervised phase before reinforcement, run by the same ModelWorkers."""

    steps: NonNegative = 0
    batch: Positive = 64
    optimizer: OptimizerConfig = OptimizerConfig(
        lr=3e-3, beta2=0.98, eps=1e-8, weight_decay=0.01, schedule="linear", min_lr_ratio=0.05, warmup_fraction=0.12
    )


class EvalConfig(Section):
    problems: NonNegative = Field(512, description="held-out problems before and after training; 0: no evaluation")
    every_steps: NonNegative = Field(0, description="evaluate while training, beside it; 0: never")
    every_problems: Positive = 256


class Config(Section):
    """One trial."""

    experiment: Name = "math"
    trial: Name = "trial"
    fileroot: str = "runs"
    seed: NonNegative = 1
    allocation: str = Field("serve.d1p1m1+d1p1m1", description="inference + training parallelism; docs/allocation.md")
    recover: Literal["auto", "resume", "off"] = Field(
        "auto", description="a trial of this name exists: go on with it; resume: it must exist, off: it must not"
    )
    resume: str = Field("", description="a trial to continue from, in any layout: its folder or a checkpoint of it")
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    generation: GenerationConfig = GenerationConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    manager: ManagerConfig = ManagerConfig()
    agreement: AgreementConfig = AgreementConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    roles: RolesConfig = RolesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    warmup: WarmupConfig = WarmupConfig()
    evaluation: EvalConfig = EvalConfig()

"""The sections of the configuration that say how models are trained: objective, optimizer, roles, checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from realsys.config.fields import (
    Name,
    NonNegative,
    NonNegativeFloat,
    Offload,
    OpenProbability,
    Positive,
    PositiveFloat,
    Probability,
    Section,
)


class NormalisationConfig(Section):
    """Advantage normalisation: GRPO, Dr.GRPO, RLOO and the paper's batch norm are settings of this."""

    mean: Literal["none", "group", "batch"] = "batch"
    std: Literal["none", "group", "batch"] = "batch"
    leave_one_out: bool = False
    eps: PositiveFloat = 1e-6


class KLConfig(Section):
    """KL divergence from a frozen reference model (role ref)."""

    coef: NonNegativeFloat = Field(0.0, description="0: no reference model")
    place: Literal["loss", "reward"] = Field("loss", description="a term of the loss, or taken off each token's reward")
    estimator: Literal["k1", "k2", "k3"] = "k3"
    adaptive: bool = Field(False, description="steer coef towards target")
    target: PositiveFloat = Field(0.1, description="KL per answer token that the adaptive coefficient steers to")
    horizon: Positive = Field(10000, description="answers over which the adaptive coefficient reacts")


class CriticConfig(Section):
    """A critic (role critic) with GAE; without it an answer has one advantage."""

    enabled: bool = False
    eps_clip: NonNegativeFloat = Field(0.2, description="clip range of the value around its old prediction; 0: off")
    loss: Literal["mse", "huber"] = "mse"
    huber_delta: PositiveFloat = 10.0
    value_norm: Literal["none", "exponential", "moving"] = Field(
        "none", description="the critic predicts returns in units of their running mean and std"
    )
    value_norm_beta: OpenProbability = Field(0.995, description="decay of the exponential running statistics")
    minibatches: Positive = 4
    warmup_steps: NonNegative = Field(0, description="first train steps in which only the critic learns")


class RewardModelConfig(Section):
    """A reward model (role reward) scores whole episodes; weight * score is added to the verifier's reward."""

    enabled: bool = False
    weight: float = 1.0


class OverlongConfig(Section):
    """Soft punishment of long answers (DAPO): falls linearly from 0 to -penalty over the last ``buffer`` tokens."""

    buffer: NonNegative = Field(0, description="tokens before max_new_tokens where it begins; 0: off")
    penalty: NonNegativeFloat = 1.0


class FilterConfig(Section):
    """Dynamic sampling: groups whose success rate lies outside [min, max] are dropped and replaced by other prompts."""

    min: Probability = 0.0
    max: Probability = 1.0


class PPOConfig(Section):
    """Policy optimisation; the published algorithms are settings of it (configs/algorithm, docs/algorithms.md)."""

    algorithm: str = Field("ppo", description="dataflow of a train step: ppo, or package.module:function")
    loss: str = Field(
        "ppo",
        description="ppo (clipped token ratio), gspo (clipped sequence ratio), cispo (clipped weight),"
        " reinforce (no ratio), or package.module:function",
    )
    loss_args: dict[str, Any] = Field({}, description="keyword arguments of a loss of your own")
    aggregation: Literal["token", "sequence", "constant"] = Field(
        "token", description="mean over tokens, over answers of token means, or over answers of sum / max_new_tokens"
    )
    use_decoupled_loss: bool = True
    eps_clip: PositiveFloat = 0.2
    eps_clip_higher: NonNegativeFloat = Field(0.0, description="upper clip if set (DAPO)")
    c_clip: NonNegativeFloat = Field(0.0, description="dual clip constant, > 1; 0: off")
    behav_imp_weight_cap: NonNegativeFloat = Field(0.0, description="bound on the behaviour weight w; 0: off")
    behav_imp_weight_mode: Literal["mask", "truncate"] = Field(
        "mask", description="beyond the cap a token contributes 0, or w is set to the cap (TIS)"
    )
    minibatches: Positive = 4
    gamma: Probability = 1.0
    lam: Probability = 1.0
    turn_rewards: bool = Field(
        False, description="add the rewards that an agent gives at single tokens (per turn) to the episode's reward"
    )
    turn_gamma: Probability = Field(1.0, description="with turn_rewards: discount from one turn of a row to the next")
    reward_scale: float = 1.0
    reward_bias: float = 0.0
    reward_clip: PositiveFloat = 20.0
    truncated_answers: Literal["keep", "zero_reward", "mask"] = Field(
        "keep", description="an answer without EOS: as judged, reward 0, or out of the loss"
    )
    overlong: OverlongConfig = OverlongConfig()
    filter: FilterConfig = FilterConfig()
    advantage: NormalisationConfig = NormalisationConfig()
    skip_zero_advantage: bool = Field(
        False, description="no forward pass for answers whose advantage is 0; they stay in the denominator"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="entropy bonus: the loss gets -coef * mean entropy")
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    early_stop_ratio: NonNegativeFloat = Field(
        0.0, description="leave out a step's remaining minibatches once the mean of u exceeds this; 0: off"
    )
    early_stop_kl: NonNegativeFloat = Field(0.0, description="the same for the approximate KL(prox || theta); 0: off")


class OptimizerConfig(Section):
    name: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat = 2e-5
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    eps: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 0.05
    decoupled_weight_decay: bool = Field(True, description="AdamW; else L2 added to the gradient")
    momentum: Probability = Field(0.9, description="of sgd")
    clip_grad: NonNegativeFloat = 1.0
    warmup_fraction: Probability = Field(0.001, description="of the total steps")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Probability = 0.0


class LoraConfig(Section):
    """Low-rank adapters: only they are trained; what is served and saved has them merged in."""

    rank: NonNegative = Field(0, description="0: off")
    alpha: PositiveFloat = 16.0
    targets: list[Literal["qkv", "proj", "gate_up", "down"]] = Field(
        ["qkv", "proj", "gate_up", "down"], min_length=1, description="fused matrices: q, k and v share one adapter"
    )


class RoleConfig(Section):
    """A model beside the actor."""

    path: str = Field("", description="HF directory; empty: the actor's, as it is after its warm-up")
    head: Literal["lm", "value"] = Field("lm", description="logits over the vocabulary, or one number per token")
    offload: Offload = "none"
    optimizer: OptimizerConfig = Field(OptimizerConfig(lr=1e-5, weight_decay=0.0), description="if it is trained")


class ValueRoleConfig(RoleConfig):
    """A model beside the actor that gives numbers instead of tokens."""

    head: Literal["lm", "value"] = "value"


class RolesConfig(Section):
    """Models beside the actor. A role exists when the algorithm's dataflow calls it; where: ``allocation``."""

    ref: RoleConfig = RoleConfig()
    critic: ValueRoleConfig = ValueRoleConfig()
    reward: ValueRoleConfig = ValueRoleConfig()
    custom: dict[Name, RoleConfig] = Field({}, description="roles of your own dataflow: name -> the same fields")


class CheckpointConfig(Section):
    """Training state on disk, to continue from; weights for serving are another thing (weights)."""

    every_steps: NonNegative = Field(20, description="steps between two; 0: only with at_end and on_stop")
    at_end: bool = False
    on_stop: bool = Field(True, description="also when the run is told to stop, if the step under way ends in time")
    keep: Positive = Field(2, description="newest checkpoints kept")
    hf_every_steps: NonNegative = Field(
        0, description="also a plain HF directory of the actor, kept for good; 0: never"
    )


class RecordConfig(Section):
    """What each step was trained on, on disk: to look at (`realsys samples`) and to repeat (`realsys replay`)."""

    samples: bool = Field(True, description="record every train step; docs/replay.md")
    keep_steps: Positive = Field(
        50, description="newest steps whose records stay; those after the oldest kept checkpoint stay in any case"
    )


class TrainConfig(Section):
    batch_groups: Positive = Field(512, description="B: prompts per train step")
    total_steps: Positive = Field(100, description="stop after this many train steps")
    total_epochs: NonNegative = Field(0, description="stop after this many passes over the prompts; 0: no limit")
    max_seconds: NonNegativeFloat = Field(0.0, description="stop this long after training has (re)started; 0: no limit")
    microbatch_tokens: Positive = 32768
    min_microbatches: Positive = 1
    threads: Positive = Field(1, description="torch threads of a rank on CPU")
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo: PPOConfig = PPOConfig()
    balance: Literal["tokens", "flops"] = Field(
        "tokens", description="what ranks and minibatches get equal shares of: tokens, or a*s + b*s^2 with attention"
    )
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: bool = Field(False, description="activation recomputation, layer by layer")
    head_chunk_tokens: NonNegative = Field(
        0, description="answer tokens whose logits exist at a time; the rest is recomputed in the backward pass; 0: all"
    )
    offload: Offload = Field("none", description="of the actor, between its calls; other roles: roles.*.offload")
    lora: LoraConfig = LoraConfig()
    max_skipped_steps: Positive = Field(
        5, description="optimizer steps skipped in a row for NaN or inf before the run ends, naming the samples"
    )

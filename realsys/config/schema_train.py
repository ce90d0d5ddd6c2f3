"""The sections ``train``, ``roles``, ``checkpoint`` and ``record`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from realsys.config.fields import (
    Decay,
    LearningRate,
    NonNegative,
    NonNegativeFloat,
    Offload,
    OpenProbability,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    SmallFloat,
)

# ---- the objective (train.ppo)


class NormalisationConfig(Section):
    """Advantage normalisation. GRPO, Dr.GRPO, RLOO and the paper's batch norm are settings of it."""

    mean: Literal["none", "group", "batch"] = Field(
        "batch", description="subtract the mean over the episodes of a prompt, over the batch, or not at all"
    )
    std: Literal["none", "group", "batch"] = Field(
        "batch", description="divide by the standard deviation over a prompt, over the batch, or not at all"
    )
    leave_one_out: bool = Field(False, description="mean of the other episodes of the prompt (RLOO); needs mean=group")
    recentre: bool = Field(
        False, description="with mean=group: subtract the mean over the batch afterwards (REINFORCE++ with a baseline)"
    )


class KLConfig(Section):
    """KL divergence from a frozen reference model (role ref)."""

    coef: SmallFloat = Field(0.0, description="weight of the KL term; 0: no reference model")
    place: Literal["loss", "reward"] = Field(
        "loss", description="add it to the loss, or subtract it from the reward of each token"
    )
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator per token (docs/algorithms.md)")
    target: NonNegativeFloat = Field(
        0.0, description="adapt coef so that the KL approaches this, in nats per token; 0: coef is fixed"
    )
    horizon: Positive = Field(10000, description="completions over which an adaptive coef reacts")


class CriticConfig(Section):
    """A critic (role critic) with GAE. Without it all tokens of an episode have the same advantage."""

    enabled: bool = Field(False, description="train a critic")
    eps_clip: NonNegativeFloat = Field(0.2, description="clip range of the value around its old prediction; 0: off")
    huber_delta: NonNegativeFloat = Field(
        0.0, description="Huber loss, linear above this error, in place of the squared error; 0: off"
    )
    value_norm: Literal["none", "exponential", "moving"] = Field(
        "none", description="predict returns in units of their running mean and standard deviation"
    )
    minibatches: Positive = Field(4, description="optimizer steps of the critic per train step")
    warmup_steps: NonNegative = Field(0, description="first train steps in which only the critic learns")


class OverlongConfig(Section):
    """Soft punishment of long completions (DAPO): it falls from 0 to -penalty over the last ``buffer`` tokens."""

    buffer: NonNegative = Field(0, description="tokens before max_new_tokens at which it begins; 0: off")
    penalty: NonNegativeFloat = Field(1.0, description="subtracted from the reward at max_new_tokens")


class FilterConfig(Section):
    """Dynamic sampling: the RolloutWorker drops groups without a signal, and other prompts take their place."""

    accept: str = Field(
        "any",
        description="groups that are trained: any, unequal_rewards (not all episodes have the same reward), or"
        " package.module:function",
    )
    min: Probability = Field(0.0, description="lowest success rate that is trained; 0: no limit")
    max: Probability = Field(1.0, description="highest success rate that is trained; 1: no limit")
    max_refills: Positive = Field(
        10,
        description="the run ends after this number of batches' worth of dropped groups, at least 256, without one that"
        " is kept",
    )

    @property
    def bounds_success(self) -> bool:
        """True if the filter needs the success rate."""
        return self.min > 0 or self.max < 1

    @property
    def compares(self) -> bool:
        """True if the filter drops every group of one episode."""
        return self.accept == "unequal_rewards" or self.bounds_success


class DpoArguments(Section):
    """``train.ppo.loss_args`` of dpo."""

    beta: PositiveFloat = Field(0.1, description="strength of the tie to the reference model")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="share of the pairs whose labels are wrong"
    )
    loss_type: Literal["sigmoid", "hinge", "ipo"] = Field("sigmoid", description="function of the margin")


class RewardModelArguments(Section):
    """``train.ppo.loss_args`` of reward_model."""

    center: NonNegativeFloat = Field(0.0, description="strength of the penalty that keeps the scores around 0")


class TeacherLossArguments(Section):
    """``train.ppo.loss_args`` of the loss distill."""

    top_k: Positive = Field(description="the teacher's most probable tokens that are compared, at each loss token")
    beta: Probability = Field(1.0, description="1: reverse KL; 0: forward KL; between: generalised JSD (GKD)")


#: built-in loss -> its ``train.ppo.loss_args``; the others have none
LOSS_ARGUMENTS: dict[str, type[Section]] = {"distill": TeacherLossArguments}
#: handler of a call that learns from ``data.demos`` -> its ``train.ppo.loss_args``
OBJECTIVES: dict[str, type[Section]] = {"sft": Section, "dpo": DpoArguments, "reward_model": RewardModelArguments}


class PPOConfig(Section):
    """Policy optimisation. The published algorithms are settings of it (configs/algorithm, docs/algorithms.md)."""

    algorithm: str = Field(
        "ppo",
        description="dataflow of a train step: ppo; sft, dpo or reward_model, which learn from data.demos;"
        " serve, for realsys serve; or package.module:function",
    )
    loss: str = Field(
        "ppo",
        description="ppo (clipped token ratio), gspo (clipped sequence ratio), cispo (clipped weight),"
        " reinforce (no ratio), distill (divergence to a teacher's top k), or package.module:function",
    )
    loss_args: dict[str, Any] = Field(
        {}, description="keyword arguments of the loss function, or of the objective of dpo or reward_model"
    )
    aggregation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="mean over all tokens; mean over episodes of their token means;"
        " or mean over episodes of sum / max_new_tokens",
    )
    use_decoupled_loss: bool | Literal["interpolated"] = Field(
        True,
        description="clip around the weights at the start of the step, and weight by w = prox / behav;"
        " interpolated: prox lies between theta and behav, which saves a forward pass (A-3PO)",
    )
    eps_clip: OpenProbability = Field(0.2, description="clip range of the ratio: 1 - eps_clip to 1 + eps_clip")
    eps_clip_higher: SmallFloat = Field(
        0.0, description="upper end of the clip range is 1 + eps_clip_higher (DAPO); 0: use eps_clip"
    )
    c_clip: NonNegativeFloat = Field(0.0, description="constant of the dual clip, above 1; 0: off")
    behav_imp_weight_cap: NonNegativeFloat = Field(
        5.0, description="largest behaviour weight w of use_decoupled_loss; 0: no limit"
    )
    behav_imp_weight_mode: Literal["mask", "truncate"] = Field(
        "mask", description="above the cap a token contributes 0 (mask), or w is set to the cap (truncate, TIS)"
    )
    minibatches: Positive = Field(4, description="optimizer steps of the actor per train step")
    gamma: Probability = Field(
        1.0, description="discount per token; must be 1 if all tokens of an episode share one advantage"
    )
    lam: Probability = Field(
        1.0, description="lambda of GAE; must be 1 if all tokens of an episode share one advantage"
    )
    turn_rewards: bool | Probability = Field(
        False,
        description="add the rewards that an agent gives at single tokens (per turn) to the episode's reward;"
        " a number: with this discount from one turn of a row to the next",
    )
    reward_scale: float = Field(1.0, description="factor of the reward; applied before reward_bias and reward_clip")
    reward_bias: float = Field(0.0, description="added to the scaled reward")
    reward_clip: PositiveFloat = Field(20.0, description="scaled rewards are clipped to [-reward_clip, reward_clip]")
    truncated_answers: Literal["keep", "zero_reward", "mask"] = Field(
        "keep",
        description="completions without end of text: keep their reward, set it to 0, or take them out of the loss",
    )
    overlong: OverlongConfig = OverlongConfig()
    filter: FilterConfig = FilterConfig()
    advantage: NormalisationConfig = NormalisationConfig()
    skip_zero_advantage: bool = Field(
        False, description="no forward pass for episodes with advantage 0; their tokens stay in the denominator"
    )
    entropy_coef: SmallFloat = Field(0.0, description="entropy bonus: subtract coef * mean entropy from the loss")
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    reward_model_weight: float = Field(
        0.0, description="add this times the score of a reward model (role reward) to the verifier's reward; 0: none"
    )
    early_stop_ratio: NonNegativeFloat = Field(
        0.0, description="skip the remaining minibatches of a step when the mean ratio u exceeds this; 0: off"
    )
    early_stop_kl: NonNegativeFloat = Field(
        0.0, description="skip them when the approximate KL(prox || theta), in nats per token, exceeds this; 0: off"
    )

    @property
    def turn_gamma(self) -> float | None:
        """Discount from one turn of a row to the next; None if rewards of turns are not trained."""
        return None if self.turn_rewards is False else float(self.turn_rewards)

    @property
    def top_k(self) -> int:
        """Tokens of a teacher that the loss reads at each loss token: its argument ``top_k``. 0: it reads none."""
        return self.loss_args.get("top_k", 0)  # type: ignore[no-any-return]  # checked in training_rules


# ---- optimizer, adapters, and models other than the actor


class OptimizerConfig(Section):
    """Optimizer and learning rate."""

    name: Literal["adam", "sgd"] = Field("adam", description="AdamW, or SGD with momentum")
    lr: LearningRate = Field(2e-5, description="learning rate after its warm-up")
    beta1: Decay = Field(0.9, description="decay of the gradient's running mean; momentum of sgd")
    beta2: Decay = Field(0.95, description="Adam: decay of the squared gradient's running mean")
    eps: OpenProbability = Field(1e-5, description="Adam: added to the root of the squared gradient's mean")
    weight_decay: SmallFloat = Field(0.05, description="weight decay per step, in units of lr")
    clip_grad: NonNegativeFloat = Field(1.0, description="largest norm of the gradient; 0: no clipping")
    warmup_fraction: Probability = Field(0.001, description="share of all steps over which lr rises linearly")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="lr after its warm-up")
    min_lr_ratio: Probability = Field(0.0, description="lr at the last step as a share of lr; linear and cosine only")


class LoraConfig(Section):
    """Low-rank adapters. Only the adapters are trained; served and saved weights have them merged in."""

    rank: NonNegative = Field(0, description="rank of the adapters; 0: off")
    alpha: PositiveFloat = Field(16.0, description="adapters are scaled by alpha / rank")
    targets: list[Literal["qkv", "proj", "gate_up", "down"]] = Field(
        ["qkv", "proj", "gate_up", "down"], min_length=1, description="fused matrices: q, k and v share one adapter"
    )


class RoleConfig(Section):
    """A model other than the actor. A role exists if the dataflow calls it; ``allocation`` places it."""

    path: str = Field("", description="HF directory; empty: the actor's model as it is after its warm-up")
    head: Literal["lm", "value"] = Field(
        "lm", description="logits over the vocabulary, or one number per token, which critic and reward have by default"
    )
    offload: Offload = Field("none", description="move this to host memory between calls")
    optimizer: dict[str, Any] = Field({}, description="fields that differ from train.optimizer, if it is trained")

    @field_validator("optimizer")
    @classmethod
    def _fields_of_an_optimizer(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            OptimizerConfig.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
            raise ValueError(f"{first['loc'][0]}: {problem}") from None
        return value


#: roles of built-in dataflows, and what their models return
BUILT_IN_ROLES: dict[str, Literal["lm", "value"]] = {"ref": "lm", "critic": "value", "reward": "value"}


def with_built_in_roles(roles: dict[str, RoleConfig]) -> dict[str, RoleConfig]:
    """Return the settings of all roles: those of built-in dataflows need none, and have a head of their own."""
    for name, head in BUILT_IN_ROLES.items():
        role = roles.get(name, RoleConfig())
        if "head" not in role.model_fields_set:
            roles = roles | {name: role.model_copy(update={"head": head})}
    return roles


# ---- checkpoints and records


class CheckpointConfig(Section):
    """Training state on disk, to continue from. Weight versions for the servers are another thing (weights)."""

    every_steps: NonNegative = Field(20, description="steps between checkpoints; 0: only at_end and on_stop")
    at_end: bool = Field(
        True, description="take a checkpoint after the last step, from which a later run with more steps continues"
    )
    on_stop: bool = Field(True, description="take a checkpoint of the last finished step when the run is stopped")
    keep: Positive = Field(2, description="number of newest checkpoints that are kept")
    hf_every_steps: NonNegative = Field(
        0, description="steps between plain HF directories of the actor, which are never removed; 0: none"
    )


class RecordConfig(Section):
    """Records of train steps on disk, to read (`realsys samples`) and to repeat (`realsys replay`)."""

    keep_steps: NonNegative = Field(
        50,
        description="newest train steps whose records are kept (docs/replay.md); those after the oldest kept checkpoint"
        " always are. 0: no records",
    )
    dropped_groups: NonNegative = Field(
        64,
        description="newest groups that were not trained, which each RolloutWorker and ModelWorker keeps to show,"
        " at most 16 MiB; 0: none",
    )


# ---- the section train


class TrainConfig(Section):
    """The train step: batch, limits, memory and parallelism."""

    loop: str = Field(
        "train",
        description="training loop: train, or your file (mine.py, which has a function train, or mine.py:function);"
        " `realsys init loop mine.py` writes one; session, evaluate and serve: set by realsys.Session, `realsys eval`"
        " and `realsys serve`",
    )
    batch_groups: Positive = Field(512, description="B: prompts per train step")
    total_steps: Positive = Field(100, description="stop after this number of train steps")
    total_epochs: NonNegative = Field(0, description="stop after this number of passes over the prompts; 0: no limit")
    max_seconds: NonNegativeFloat = Field(
        0.0, description="stop this number of seconds after training has (re)started; 0: no limit"
    )
    microbatch_tokens: Positive = Field(
        32768, description="most tokens in one forward and backward pass of a rank; bounds its memory"
    )
    inference_microbatch_tokens: NonNegative = Field(
        0,
        description="the same without gradients: no activations are kept, so with head_chunk_tokens 2 to 4 times as"
        " many tokens take as much memory; 0: microbatch_tokens",
    )
    min_microbatches: NonNegative = Field(
        0,
        description="fewest micro-batches per minibatch and rank, if it has as many sequences;"
        " 0: 4 per pipeline stage, or 1 without a pipeline",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo: PPOConfig = PPOConfig()
    balance: Literal["tokens", "flops"] = Field(
        "flops",
        description="give ranks, minibatches and micro-batches equal numbers of tokens, or equal work a*s + b*s^2",
    )
    sequence_parallel: bool = Field(
        False,
        description="split norms and residual stream along the sequence over tensor ranks; with m1 without effect",
    )
    distributed_optimizer: bool = Field(
        False, description="shard the optimizer state over the data-parallel ranks (Megatron)"
    )
    overlap_grad_reduce: bool = Field(
        False,
        description="reduce gradients over the data ranks during the last backward pass, not after it (Megatron)",
    )
    deterministic: bool = Field(
        False,
        description="on GPUs: deterministic algorithms of torch, cuBLAS and NCCL: bit-equal replays, slower steps",
    )
    peak_tflops: NonNegativeFloat = Field(
        0.0, description="peak TFLOP/s of one GPU in bfloat16, for the MFU in the step log; 0: from the GPU's name"
    )
    recompute: bool | NonNegative | Literal["auto"] = Field(
        False,
        description="recompute activations in the backward pass: of no layer, of all, of this number of layers of each"
        " pipeline stage, or auto: of as few as fit (docs/allocation.md)",
    )
    head_chunk_tokens: NonNegative = Field(
        0, description="tokens whose logits are in memory at a time; the backward pass computes them again; 0: all"
    )
    offload: Offload = Field(
        "none", description="move this of the actor to host memory between calls; other roles: roles.*.offload"
    )
    lora: LoraConfig = LoraConfig()
    engine_check: NonNegativeFloat = Field(
        0.05,
        description="warn when the log-probs of generation engine and trainer differ by more than this for the same"
        " weights, in nats per token (docs/manager.md); costs a copy of the weights in host memory. 0: no check",
    )

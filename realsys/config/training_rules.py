"""Rules of training that span several fields: batch and layouts, and settings that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from realsys.config.allocation import ACTOR, Allocation
from realsys.config.dataflow import TEACHER, Dataflow, role_field, role_settings, token_level_advantages
from realsys.config.doors import AGENT, FILTER, LOOP, LOSS
from realsys.config.fields import arguments_of
from realsys.config.schema import Config
from realsys.config.schema_train import LOSS_ARGUMENTS, OBJECTIVES, OptimizerConfig, TeacherLossArguments
from realsys.errors import ConfigError


def check_training(config: Config, allocation: Allocation, flow: Dataflow) -> None:
    """Raise ConfigError for the first rule that is broken."""
    _check_batch(config, allocation, flow)
    LOOP.check(config.train.loop)
    if config.train.distributed_optimizer:
        for field, optimizer in _optimizers(config, flow):
            _check_sharded(field, optimizer)
    for role in flow.roles:
        if role_settings(config, role).offload != "optimizer":
            continue
        if role not in flow.trained_roles and role != ACTOR:
            problem = "must be none or all: the role is not trained and has no optimizer"
            raise ConfigError(f"{role_field(role)}.offload", "optimizer", problem)
    _check_rewards(config)
    _check_selection(config)
    _check_loss(config, flow)
    _check_advantages(config)


def _check_batch(config: Config, allocation: Allocation, flow: Dataflow) -> None:
    ppo = config.train.ppo
    sequences = config.train.batch_groups * config.rollout.trained_episodes
    for role in flow.trained_roles:
        data = allocation.placement(role).layout.data
        minibatches = ppo.critic.minibatches if role == "critic" else ppo.minibatches
        if sequences < minibatches * data:
            problem = (
                f"{config.train.batch_groups} groups x {config.rollout.trained_episodes} episodes are fewer than "
                f"{minibatches} minibatches x {data} data-parallel ranks of the {role}"
            )
            raise ConfigError("train.batch_groups", config.train.batch_groups, problem)
    if config.warmup.steps and config.warmup.batch < allocation.actor.data:
        problem = f"must be at least the {allocation.actor.data} data-parallel ranks"
        raise ConfigError("warmup.batch", config.warmup.batch, problem)


def can_shard_optimizers(config: Config, flow: Dataflow) -> bool:
    """Return True if ``train.distributed_optimizer`` is possible: Megatron shards AdamW only."""
    return all(each.name == "adam" for _, each in _optimizers(config, flow))


def _optimizers(config: Config, flow: Dataflow) -> Iterator[tuple[str, OptimizerConfig]]:
    """Yield the sections of all optimizers of a trial."""
    if config.warmup.steps:
        yield "warmup.optimizer", config.warmup.optimizer
    for role in flow.trained_roles:
        section = "train" if role == ACTOR else role_field(role)
        yield f"{section}.optimizer", role_settings(config, role).optimizer


def _check_sharded(field: str, optimizer: OptimizerConfig) -> None:
    """Refuse other optimizers than AdamW, whose state is to be sharded."""
    if optimizer.name != "adam":
        problem = "must be adam with train.distributed_optimizer, which shards the state of AdamW only"
        raise ConfigError(f"{field}.name", optimizer.name, problem)


def _check_rewards(config: Config) -> None:
    ppo, reward = config.train.ppo, config.rollout.reward
    if reward.correct <= reward.wrong and not (reward.correct == reward.wrong and ppo.reward_model_weight):
        raise ConfigError(
            "rollout.reward.correct", reward.correct, f"must be above rollout.reward.wrong ({reward.wrong})"
        )
    longest = config.generation.sampling.max_new_tokens
    if ppo.overlong.buffer > longest:
        raise ConfigError(
            "train.ppo.overlong.buffer", ppo.overlong.buffer, f"must not exceed max_new_tokens ({longest})"
        )
    if ppo.reward_model_weight and not config.roles["reward"].path:
        problem = "train.ppo.reward_model_weight needs a reward model: set an HF *ForSequenceClassification directory"
        raise ConfigError("roles.reward.path", "", problem)
    if not ppo.reward_scale and ppo.kl.coef and ppo.kl.place == "reward" and not config.roles["ref"].path:
        problem = "train.ppo.reward_scale=0 leaves the KL to this model as the only reward: set the teacher's directory"
        raise ConfigError("roles.ref.path", "", problem)


def _check_selection(config: Config) -> None:
    """Check the settings of docs/sampling.md against each other."""
    rollout, ppo, curriculum = config.rollout, config.train.ppo, config.data.curriculum
    if ppo.filter.min > ppo.filter.max:
        raise ConfigError("train.ppo.filter.min", ppo.filter.min, f"must not exceed filter.max ({ppo.filter.max})")
    if curriculum.min > curriculum.max:
        problem = f"must not exceed data.curriculum.max ({curriculum.max})"
        raise ConfigError("data.curriculum.min", curriculum.min, problem)
    FILTER.check(ppo.filter.accept)
    if rollout.group_size == 1 and ppo.filter.compares:
        problem = "train.ppo.filter needs at least 2 episodes per prompt: increase it, or set the filter's defaults"
        raise ConfigError("rollout.group_size", 1, problem)
    kept = rollout.keep.episodes
    if kept and kept >= rollout.group_size:
        problem = f"must be below rollout.group_size ({rollout.group_size}), or 0 to train all"
        raise ConfigError("rollout.keep.episodes", kept, problem)
    if kept == 1 and "group" in (ppo.advantage.mean, ppo.advantage.std):
        raise ConfigError("rollout.keep.episodes", 1, "must be at least 2: advantages are normalised per group")
    if kept and rollout.keep.by == "best" and ppo.advantage.mean == "group":
        problem = "the best episodes have similar rewards, and mean=group subtracts them: set by=spread, or mean=batch"
        raise ConfigError("rollout.keep.by", "best", problem)


def _check_loss(config: Config, flow: Dataflow) -> None:
    ppo = config.train.ppo
    if objectives := [OBJECTIVES[call.handler] for call in flow.calls if call.handler in OBJECTIVES]:
        arguments_of(objectives[0], ppo.loss_args, LOSS.arguments_field)
        return
    if ppo.loss in LOSS_ARGUMENTS:
        arguments_of(LOSS_ARGUMENTS[ppo.loss], ppo.loss_args, LOSS.arguments_field)
    elif ppo.loss_args and ppo.loss in LOSS.builtin:
        problem = f"must be empty for loss={ppo.loss}, which reads its settings from train.ppo"
        raise ConfigError("train.ppo.loss_args", ppo.loss_args, problem)
    LOSS.check(ppo.loss, ppo.loss_args)
    if "top_k" in ppo.loss_args:
        _check_teacher(config, flow)
    if 0 < ppo.c_clip <= 1:
        raise ConfigError("train.ppo.c_clip", ppo.c_clip, "must be above 1, or 0 for off")
    if ppo.c_clip and ppo.loss in LOSS.builtin and ppo.loss != "ppo":  # a loss of the user may read c_clip
        raise ConfigError(
            "train.ppo.c_clip", ppo.c_clip, f"must be 0 for loss={ppo.loss}: only loss=ppo has a dual clip"
        )
    if ppo.behav_imp_weight_mode == "truncate" and not ppo.behav_imp_weight_cap:
        problem = "needs a cap: set train.ppo.behav_imp_weight_cap above 0"
        raise ConfigError("train.ppo.behav_imp_weight_mode", "truncate", problem)
    if 0 < ppo.early_stop_ratio <= 1:
        problem = "must be above 1, the mean of u before the first update, or 0 for off"
        raise ConfigError("train.ppo.early_stop_ratio", ppo.early_stop_ratio, problem)
    if ppo.kl.target and not ppo.kl.coef:
        raise ConfigError("train.ppo.kl.coef", 0.0, "must be above 0 to approach train.ppo.kl.target")


def _check_teacher(config: Config, flow: Dataflow) -> None:
    """Check that a loss with ``top_k`` has a teacher, and gets its tokens."""
    ppo, agent = config.train.ppo, config.rollout.agent
    arguments_of(TeacherLossArguments, {"top_k": ppo.top_k}, LOSS.arguments_field)
    if ppo.loss == "distill" and ppo.use_decoupled_loss is not False:
        problem = "must be false for loss=distill, which has no ratio: set algorithm=distill_topk"
        raise ConfigError("train.ppo.use_decoupled_loss", ppo.use_decoupled_loss, problem)
    if ppo.kl.coef == 0 and agent in AGENT.builtin and agent != "distill":
        problem = "asks no teacher, whose tokens the loss reads: set distill, or train.ppo.kl.coef=1 for the role ref"
        raise ConfigError("rollout.agent", agent, problem)
    if not any(call.inputs >= TEACHER for call in flow.calls if call.trains):
        problem = f"no call that trains reads {', '.join(sorted(TEACHER))}, but train.ppo.loss={ppo.loss} does"
        raise ConfigError("train.ppo.algorithm", ppo.algorithm, problem)


def _check_advantages(config: Config) -> None:
    ppo = config.train.ppo
    if ppo.advantage.leave_one_out and ppo.advantage.mean != "group":
        raise ConfigError("train.ppo.advantage.leave_one_out", True, "needs train.ppo.advantage.mean=group")
    if ppo.advantage.recentre and (ppo.advantage.mean != "group" or ppo.advantage.std == "group"):
        raise ConfigError(
            "train.ppo.advantage.recentre", True, "needs advantage.mean=group, and a std that is not of it"
        )
    if config.rollout.group_size == 1 and "group" in (ppo.advantage.mean, ppo.advantage.std):
        raise ConfigError("rollout.group_size", 1, "group normalisation needs at least 2 episodes per prompt")
    if token_level_advantages(config):
        if ppo.skip_zero_advantage:
            problem = (
                "must be false: with a critic, a KL in the reward or rewards of turns the tokens differ in advantage"
            )
            raise ConfigError("train.ppo.skip_zero_advantage", True, problem)
        return
    for name, value in (("gamma", ppo.gamma), ("lam", ppo.lam)):
        if value != 1.0:
            problem = "must be 1: without a critic (train.ppo.critic.enabled) an episode has one advantage"
            raise ConfigError(f"train.ppo.{name}", value, problem)

"""The built-in algorithms: functions Config -> Dataflow. No torch: the master runs them."""

from __future__ import annotations

from realsys.config.dataflow import (
    REWARD_MODEL,
    SOURCE_KEYS,
    TEACHER,
    TOKEN_REWARDS,
    Dataflow,
    FunctionCall,
    token_level_advantages,
    with_offload,
)
from realsys.config.schema import Config


def ppo(config: Config) -> Dataflow:
    """Declare PPO with the calls that the settings switch on (``train.ppo.algorithm=ppo``)."""
    ppo = config.train.ppo
    in_reward = ppo.kl.coef > 0 and ppo.kl.place == "reward"
    in_loss = ppo.kl.coef > 0 and ppo.kl.place == "loss"
    scores = frozenset({"scores"} if ppo.reward_model_weight else ())
    # With one minibatch the weights before the first update are those of the training pass itself.
    needs_prox = ppo.use_decoupled_loss is True and (ppo.minibatches > 1 or in_reward)
    prox = frozenset({"prox_logprobs"} if needs_prox else ())
    source = frozenset({"tokens", "behav_logprobs"})
    tokens = frozenset({"tokens"})
    teacher = TEACHER if ppo.top_k else frozenset()
    calls = []
    if ppo.reward_model_weight:
        calls.append(FunctionCall("reward_inf", "reward", "reward_inf", tokens, scores))
    if prox:
        # Rows with advantage 0 need no proximal log-probs, but with a reward model only the scores tell
        # which rows these are.
        needed = source | {"versions"} | (scores if ppo.skip_zero_advantage else frozenset())
        calls.append(FunctionCall("actor_inf", "actor", "actor_inf", needed, prox))
    if ppo.kl.coef > 0:
        calls.append(FunctionCall("ref_inf", "ref", "ref_inf", tokens, teacher | {"ref_logprobs"}))
    if ppo.critic.enabled:
        calls.append(FunctionCall("critic_inf", "critic", "critic_inf", tokens, frozenset({"values"})))
    # Versions: without actor_inf, this call compares engine and trainer, and may interpolate.
    reads = source | (prox or {"versions"}) | scores | teacher
    if token_level_advantages(config):
        inputs = frozenset({"behav_logprobs"}) | prox | scores
        inputs |= frozenset({"ref_logprobs"} if in_reward else ()) | frozenset({"values"} if ppo.critic.enabled else ())
        inputs |= frozenset({TOKEN_REWARDS, "loss_mask"} if ppo.turn_gamma is not None else ())
        outputs = frozenset({"advantages"} | ({"returns"} if ppo.critic.enabled else set()))
        calls.append(FunctionCall("advantages", "actor", "advantages", inputs, outputs))
        reads |= {"advantages"}
    reads |= frozenset({"ref_logprobs"} if in_loss else ())
    calls.append(FunctionCall("actor_train", "actor", "actor_train", reads, trains=True))
    if ppo.critic.enabled:
        inputs = frozenset({"tokens", "values", "returns"})
        calls.append(FunctionCall("critic_train", "critic", "critic_train", inputs, trains=True))
    arriving = {TOKEN_REWARDS} if ppo.turn_gamma is not None else set()
    return Dataflow(calls, SOURCE_KEYS | arriving | (teacher if ppo.kl.coef == 0 else set()))


def sft(config: Config) -> Dataflow:
    """Declare supervised fine-tuning of the actor on demonstrations (``train.ppo.algorithm=sft``), also its warm-up."""
    call = FunctionCall("sft", "actor", "sft", frozenset({"tokens"}), trains=True)
    return with_offload(Dataflow([call], {"tokens"}, "demonstrations"), config)


def dpo(config: Config) -> Dataflow:
    """Declare direct preference optimisation of the actor (``train.ppo.algorithm=dpo``)."""
    calls = [
        FunctionCall("ref_inf", "ref", "ref_inf", frozenset({"tokens"}), frozenset({"ref_logprobs"})),
        FunctionCall("dpo", "actor", "dpo", frozenset({"tokens", "ref_logprobs"}), trains=True),
    ]
    return Dataflow(calls, {"tokens"}, "preferences")


def reward_model(config: Config) -> Dataflow:
    """Declare the training of a reward model on preferences: the actor has a value head."""
    call = FunctionCall(REWARD_MODEL, "actor", REWARD_MODEL, frozenset({"tokens"}), trains=True)
    return Dataflow([call], {"tokens"}, "preferences")


def serve(config: Config) -> Dataflow:
    """Declare the call of the training service: loss and gradient of rows that clients send (`realsys serve`)."""
    inputs = frozenset({"tokens", "behav_logprobs", "advantages"})
    call = FunctionCall("tenant_loss", "actor", "tenant_loss", inputs, frozenset({"prox_logprobs"}), trains=True)
    return Dataflow([call], inputs, "clients")

"""The dataflow graph of model function calls, declared as data and checked before anything starts.

A call is ready when every key it reads is there. Everything that the settings of ``train.ppo`` can switch on:

    (stream) tokens with loss_mask, behav_logprobs, versions, token_rewards
        ├──> actor_inf   -> prox_logprobs     decoupled loss
        ├──> ref_inf     -> ref_logprobs      KL to a reference
        ├──> critic_inf  -> values            critic
        ├──> reward_inf  -> scores            reward model
        ├──> advantages  -> advantages, returns   where an answer's tokens differ: critic, or KL in the reward
        ├──> actor_train
        └──> critic_train

An algorithm of one's own is a function Config -> Dataflow under a name of its own (``register_algorithm``), in a module
named in ``plugins.dataflow``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from realsys.config.registry import Registry
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError

#: what a trajectory brings with it when it arrives at a DP head
SOURCE_KEYS = frozenset({"tokens", "loss_mask", "behav_logprobs", "versions"})
#: what it brings with it if the dataflow lists it in its source keys
TOKEN_REWARDS = "token_rewards"


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One model function call: which interface of which role reads and makes which keys.

    ``trains``: it changes the role's weights. Hooks are names registered with the ModelWorkers
    (``realsys.train.hooks``), run before and after the call on every rank of the role's mesh.
    """

    name: str
    role: str
    interface: str
    inputs: frozenset[str]
    outputs: frozenset[str] = frozenset()
    trains: bool = False
    pre_hooks: tuple[str, ...] = ()
    post_hooks: tuple[str, ...] = ()


class Dataflow:
    """A checked set of calls. Raises ConfigError on a double name, a key nobody makes, a key made twice, or a cycle."""

    def __init__(self, calls: Iterable[FunctionCall], source_keys: Iterable[str] = SOURCE_KEYS) -> None:
        self.calls = tuple(_with_mask(call) for call in calls)
        self.source_keys = frozenset(source_keys) | {"loss_mask"}
        names = [call.name for call in self.calls]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("dataflow", name, "two calls have this name")
        makers: dict[str, str] = dict.fromkeys(self.source_keys, "the stream")
        for call in self.calls:
            for key in sorted(call.outputs):
                if key in makers:
                    raise ConfigError("dataflow", call.name, f"makes key {key!r}, which {makers[key]} makes already")
                makers[key] = call.name
        for call in self.calls:
            for key in sorted(call.inputs - makers.keys()):
                raise ConfigError("dataflow", call.name, f"reads key {key!r}, which nothing makes")
        self._check_cycles()

    def _check_cycles(self) -> None:
        available, left = set(self.source_keys), list(self.calls)
        while left:
            ready = [call for call in left if call.inputs <= available]
            if not ready:
                raise ConfigError("dataflow", ", ".join(c.name for c in left), "these calls wait for one another")
            for call in ready:
                available |= call.outputs
            left = [call for call in left if call not in ready]

    @property
    def roles(self) -> list[str]:
        """The model roles that are called, in the order of their first call."""
        return list(dict.fromkeys(call.role for call in self.calls))

    @property
    def trained_roles(self) -> list[str]:
        return list(dict.fromkeys(call.role for call in self.calls if call.trains))

    def ready(self, available: Iterable[str], started: Iterable[str]) -> list[FunctionCall]:
        """Calls not yet started whose keys are all there, in declaration order."""
        have, gone = set(available), set(started)
        return [call for call in self.calls if call.name not in gone and call.inputs <= have]

    def last_consumers(self) -> dict[str, set[str]]:
        """Key -> names of the calls that read it; when all have run, the key may be dropped."""
        readers: dict[str, set[str]] = {}
        for call in self.calls:
            for key in call.inputs:
                readers.setdefault(key, set()).add(call.name)
        return readers


def _with_mask(call: FunctionCall) -> FunctionCall:
    """Tokens come with their loss mask: without it nobody knows which of them to score."""
    return replace(call, inputs=call.inputs | {"loss_mask"}) if "tokens" in call.inputs else call


Builder = Callable[[Config], Dataflow]
ALGORITHMS: Registry[Builder] = Registry("algorithm", "plugins.dataflow")


def register_algorithm(name: str) -> Callable[[Builder], Builder]:
    """Decorator: ``train.ppo.algorithm=name`` runs the dataflow that this function returns.

    Raises ConfigError when the name is taken.
    """
    return ALGORITHMS.register(name)


def import_plugins(field: str, modules: Iterable[str]) -> None:
    """Import modules of the user. Raises ConfigError naming the one that cannot be imported, and why."""
    for module in modules:
        try:
            importlib.import_module(module)
        except RealsysError:
            raise  # of ours already: a name registered twice
        except Exception as exc:  # whatever a module of the user may raise
            raise ConfigError(field, module, f"cannot be imported: {type(exc).__name__}: {exc}") from exc


def require_plugins(field: str, modules: Iterable[str]) -> None:
    """As ``import_plugins``, for modules that this process must not import, since they need torch: they are only found.

    Raises ConfigError.
    """
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):  # of a package above it
            found = False
        if not found:
            raise ConfigError(field, module, "is no module that Python finds here; set PYTHONPATH to where it lies")


def dataflow_of(config: Config) -> Dataflow:
    """The graph of one train step. Raises ConfigError."""
    import_plugins("plugins.dataflow", config.plugins.dataflow)
    builder = ALGORITHMS.find(config.train.ppo.algorithm, "train.ppo.algorithm")
    return with_offload(builder(config), config)


def with_offload(flow: Dataflow, config: Config) -> Dataflow:
    """The same graph; calls of a role with ``offload`` bring it in before and send it out after (its hooks)."""
    calls = []
    for call in flow.calls:
        if role_settings(config, call.role).offload != "none":
            call = replace(call, pre_hooks=("onload", *call.pre_hooks), post_hooks=(*call.post_hooks, "offload"))
        calls.append(call)
    return Dataflow(calls, flow.source_keys)


@register_algorithm("ppo")
def ppo_dataflow(config: Config) -> Dataflow:
    """PPO with what the settings switch on."""
    ppo = config.train.ppo
    in_reward = ppo.kl.coef > 0 and ppo.kl.place == "reward"
    in_loss = ppo.kl.coef > 0 and ppo.kl.place == "loss"
    scores = frozenset({"scores"} if ppo.reward_model.enabled else ())
    prox = frozenset({"prox_logprobs"} if ppo.use_decoupled_loss else ())
    source = frozenset({"tokens", "behav_logprobs"})
    tokens = frozenset({"tokens"})
    calls = []
    if ppo.reward_model.enabled:
        calls.append(FunctionCall("reward_inf", "reward", "reward_inf", tokens, scores))
    if prox:
        # Which answers have advantage 0, and so need no proximal log-probs, is known only with their scores.
        needed = source | {"versions"} | (scores if ppo.skip_zero_advantage else frozenset())
        calls.append(FunctionCall("actor_inf", "actor", "actor_inf", needed, prox))
    if ppo.kl.coef > 0:
        calls.append(FunctionCall("ref_inf", "ref", "ref_inf", tokens, frozenset({"ref_logprobs"})))
    if ppo.critic.enabled:
        calls.append(FunctionCall("critic_inf", "critic", "critic_inf", tokens, frozenset({"values"})))
    reads = source | prox | scores
    if token_level_advantages(config):
        inputs = frozenset({"behav_logprobs"}) | prox | scores
        inputs |= frozenset({"ref_logprobs"} if in_reward else ()) | frozenset({"values"} if ppo.critic.enabled else ())
        inputs |= frozenset({TOKEN_REWARDS, "loss_mask"} if ppo.turn_rewards else ())
        outputs = frozenset({"advantages"} | ({"returns"} if ppo.critic.enabled else set()))
        calls.append(FunctionCall("advantages", "actor", "advantages", inputs, outputs))
        reads |= {"advantages"}
    reads |= frozenset({"ref_logprobs"} if in_loss else ())
    calls.append(FunctionCall("actor_train", "actor", "actor_train", reads, trains=True))
    if ppo.critic.enabled:
        inputs = frozenset({"tokens", "values", "returns"})
        calls.append(FunctionCall("critic_train", "critic", "critic_train", inputs, trains=True))
    return Dataflow(calls, SOURCE_KEYS | ({TOKEN_REWARDS} if ppo.turn_rewards else set()))


def token_level_advantages(config: Config) -> bool:
    """Whether the tokens of an answer have advantages of their own, which takes a call of its own to compute."""
    ppo = config.train.ppo
    return ppo.critic.enabled or ppo.turn_rewards or (ppo.kl.coef > 0 and ppo.kl.place == "reward")


def saved_roles(config: Config, flow: Dataflow) -> list[str]:
    """The roles whose weights stand in no HF directory, so that only a checkpoint has them.

    Those that are trained, and after a supervised warm-up those that start with the actor's weights.
    """
    as_actor = [role for role in flow.roles if config.warmup.steps and role_settings(config, role).as_actor]
    return list(dict.fromkeys([*flow.trained_roles, *as_actor]))


def sft_dataflow(config: Config) -> Dataflow:
    """Supervised warm-up of the actor."""
    call = FunctionCall("sft", "actor", "sft", frozenset({"tokens"}), trains=True)
    return with_offload(Dataflow([call], source_keys={"tokens"}), config)

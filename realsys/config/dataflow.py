"""Dataflow graph of model function calls, declared as data and checked before anything starts.

A call is ready when all keys that it reads exist. These are the calls that the settings of ``train.ppo`` can enable:

    (stream) tokens with loss_mask, behav_logprobs, versions, token_rewards, kv_versions, temperatures, TEACHER
        ├──> actor_inf   -> prox_logprobs     decoupled loss, several minibatches
        ├──> ref_inf     -> ref_logprobs      KL to a reference; TEACHER, too, if the loss reads a teacher's top k
        ├──> critic_inf  -> values            critic
        ├──> reward_inf  -> scores            reward model
        ├──> advantages  -> advantages, returns   one per token: critic, KL in the reward, rewards of turns
        ├──> actor_train
        └──> critic_train

``train.ppo.algorithm`` names the function Config -> Dataflow that declares the graph: a built-in one
(``realsys.algorithm.dataflows``) or ``package.module:function``. Launcher, MasterWorker and ModelWorkers call it, so
its module should not import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from realsys.config.allocation import ACTOR, lent_servers
from realsys.config.doors import AGENT, ALGORITHM, CALL_HANDLER, HOOK
from realsys.config.fields import Offload
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_train import LoraConfig, OptimizerConfig
from realsys.errors import ConfigError

#: arrays of every row that arrives at a DP head
SOURCE_KEYS = frozenset({"tokens", "loss_mask", "behav_logprobs", "versions"})
#: array of a row if the dataflow lists it in its source keys
TOKEN_REWARDS = "token_rewards"
#: likewise; read by the calls that compare log-probs, if the engines may keep keys (``kv_on_update``)
KV_VERSIONS = "kv_versions"
#: likewise; read by all language models, if an agent may choose the temperature of a call
TEMPERATURES = "temperatures"
#: likewise, if the loss reads a teacher's most probable tokens (``PPOConfig.top_k``) and the teacher is no role
TEACHER_TOKENS, TEACHER_LOGPROBS = "teacher_tokens", "teacher_logprobs"
TEACHER = frozenset({TEACHER_TOKENS, TEACHER_LOGPROBS})
NO_LORA = LoraConfig()
#: where the rows of a step come from: agents; the lines of ``data.demos``, which are responses to imitate or pairs of a
#: chosen and a rejected one; or clients of `realsys serve`
Rows = Literal["rollout", "demonstrations", "preferences", "clients"]
#: handlers that train and obey the argument ``measure``
_MEASURING = frozenset({"sft", "dpo", "reward_model"})
#: algorithm of `realsys serve`
SERVE = "serve"
#: algorithm whose actor has a value head
REWARD_MODEL = "reward_model"


def _keys(names: str = "") -> frozenset[str]:
    return frozenset(names.split())


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One model function call: its handler, its role, and the keys that it reads and makes.

    handler                built-in name (``realsys.config.doors.CALL_HANDLER``), or ``package.module:Class`` of a class
                           with ``run(role, request)`` (``realsys.train.worker.call_handlers.CallHandler``)
    trains                 True if the call changes the weights of the role
    pre_hooks, post_hooks  built-in names (``HOOK``) or ``package.module:function`` of functions of (role, request),
                           run before and after the call on every rank of the role's mesh
    """

    name: str
    role: str
    handler: str
    inputs: frozenset[str]
    outputs: frozenset[str] = frozenset()
    trains: bool = False
    pre_hooks: tuple[str, ...] = ()
    post_hooks: tuple[str, ...] = ()


class Dataflow:
    """A checked set of calls on ``rows``.

    Raises ConfigError for a duplicate name, a key without a maker or with two, and a cycle.
    """

    def __init__(
        self, calls: Iterable[FunctionCall], source_keys: Iterable[str] = SOURCE_KEYS, rows: Rows = "rollout"
    ) -> None:
        # the mask says which tokens to score
        self.calls = tuple(
            replace(call, inputs=call.inputs | {"loss_mask"}) if "tokens" in call.inputs else call for call in calls
        )
        self.source_keys = frozenset(source_keys) | {"loss_mask"}
        self.rows = rows
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
                raise ConfigError("dataflow", call.name, f"reads key {key!r}, which no call makes")
        available = set(self.source_keys)
        waiting = list(self.calls)
        while waiting:
            ready = [call for call in waiting if call.inputs <= available]
            if not ready:
                raise ConfigError("dataflow", ", ".join(c.name for c in waiting), "these calls wait for one another")
            for call in ready:
                available |= call.outputs
            waiting = [call for call in waiting if call not in ready]

    @property
    def roles(self) -> list[str]:
        """Model roles that have a call, in the order of their first call."""
        return list(dict.fromkeys(call.role for call in self.calls))

    @property
    def trained_roles(self) -> list[str]:
        """Model roles that a call trains, in the order of their first training call."""
        return list(dict.fromkeys(call.role for call in self.calls if call.trains))

    def ready(self, available: Iterable[str], started: Iterable[str]) -> list[FunctionCall]:
        """Return the calls that have not started and whose keys are all available, in declaration order."""
        available_keys, started_names = set(available), set(started)
        return [call for call in self.calls if call.name not in started_names and call.inputs <= available_keys]

    def last_consumers(self) -> dict[str, set[str]]:
        """Return key -> names of the calls that read it. When all of them have run, the key may be deleted."""
        readers: dict[str, set[str]] = {}
        for call in self.calls:
            for key in call.inputs:
                readers.setdefault(key, set()).add(call.name)
        return readers


# ---- the dataflow of a configuration


#: ``id(config)`` -> the configuration and its dataflow; cached because every call of a step needs it
_DATAFLOWS: dict[int, tuple[weakref.ref[Config], Dataflow]] = {}


def dataflow_of(config: Config) -> Dataflow:
    """Return the graph of one train step, built once per configuration. Raises ConfigError."""
    key = id(config)
    if (cached := _DATAFLOWS.get(key)) is not None and cached[0]() is config:
        return cached[1]
    flow = _completed(_build(config), config)
    # A weak reference, so that another object cannot get the entry of a deleted configuration with the same id.
    _DATAFLOWS[key] = (weakref.ref(config, lambda _: _DATAFLOWS.pop(key, None)), flow)
    return flow


def _build(config: Config) -> Dataflow:
    """Call the algorithm that the configuration names. Raises ConfigError."""
    name = config.train.ppo.algorithm
    algorithm = ALGORITHM.load(name)
    with ALGORITHM.guard(name, "raised"):
        flow = algorithm(config)
    if not isinstance(flow, Dataflow):
        raise ConfigError(ALGORITHM.field, name, f"must return a Dataflow, not {type(flow).__name__}")
    return flow


def _completed(flow: Dataflow, config: Config) -> Dataflow:
    """Return the graph with the keys and hooks that follow from settings outside of ``train.ppo``."""
    return with_offload(_with_temperatures(_with_kv_versions(flow, config), config), config)


#: call of a training script on a role -> (handler, keys that it must have, keys that it reads if they are there, keys
#: that it makes)
_SCRIPT_CALLS: Mapping[str, tuple[str, frozenset[str], frozenset[str], frozenset[str]]] = {
    "actor.logprobs": ("actor_inf", _keys("tokens behav_logprobs versions"), _keys("scores"), _keys("prox_logprobs")),
    "logprobs": ("ref_inf", _keys("tokens"), _keys(), _keys("ref_logprobs")),
    "values": ("critic_inf", _keys("tokens"), _keys(), _keys("values")),
    "scores": ("reward_inf", _keys("tokens"), _keys(), _keys("scores")),
    "advantages": (
        "advantages",
        _keys("behav_logprobs loss_mask"),
        _keys("prox_logprobs scores ref_logprobs values") | {TOKEN_REWARDS},
        _keys("advantages"),
    ),
    "actor.train": (
        "actor_train",
        _keys("tokens behav_logprobs versions"),
        _keys("prox_logprobs scores advantages ref_logprobs"),
        _keys(),
    ),
    "train": ("critic_train", _keys("tokens values returns"), _keys(), _keys()),
}


def script_call(config: Config, role: str, what: str, keys: Set[str]) -> Dataflow:
    """Return the graph of one call of a training script on a batch that has the arrays ``keys``.

    It is the call of the configuration's dataflow with the same handler and role if the batch has all that that one
    reads. What it has made before, it makes again. Raises ConfigError for a role without a model, an unknown call, and
    keys that no call has made.
    """
    flow = dataflow_of(config)
    if role not in (ACTOR, *flow.roles):
        hints = {"ref": "set train.ppo.kl.coef", "critic": "set train.ppo.critic.enabled=true"}
        hint = hints.get(
            role, "set train.ppo.reward_model_weight" if role == "reward" else "declare a dataflow with it"
        )
        raise ConfigError("dataflow", f"{role}.{what}", f"no call of train.ppo.algorithm loads the role {role}: {hint}")
    found = _SCRIPT_CALLS.get(f"{role}.{what}", _SCRIPT_CALLS.get(what))
    if found is None:
        raise ConfigError("dataflow", f"{role}.{what}", f"unknown call: use one of {', '.join(_SCRIPT_CALLS)}")
    handler, needed, optional, made = found
    for call in flow.calls:
        if (call.handler, call.role) == (handler, role) and call.inputs <= keys:
            return Dataflow([call], keys - call.outputs, flow.rows)
    if missing := needed - keys:
        problem = f"the batch has no {', '.join(sorted(missing))}: compute them first"
        raise ConfigError("dataflow", f"{role}.{what}", problem)
    reads = needed | (optional & keys)
    if "prox_logprobs" in reads and what == "train":
        reads -= {"versions"}
    if what == "train" and config.train.ppo.kl.place == "reward":
        reads -= {"ref_logprobs"}  # they are in the advantages
    made |= _keys("returns") if what == "advantages" and "values" in reads else _keys()
    name = what if what == "advantages" else f"{role}_{'train' if what == 'train' else 'inf'}"
    call = FunctionCall(name, role, handler, reads, made, trains=what == "train")
    return _completed(Dataflow([call], keys - made, flow.rows), config)


def _with_kv_versions(flow: Dataflow, config: Config) -> Dataflow:
    """Add the versions of keys to the inputs of the call that compares log-probs, if keys outlive an update."""
    compares = comparing_call(flow)
    if config.asynchronous.kv_on_update != "keep" or compares is None:
        return flow
    calls = [replace(c, inputs=c.inputs | {KV_VERSIONS}) if c is compares else c for c in flow.calls]
    return Dataflow(calls, flow.source_keys | {KV_VERSIONS}, flow.rows)


def comparing_call(flow: Dataflow) -> FunctionCall | None:
    """Return the call that compares log-probs of engine and trainer: the actor's first one that reads versions."""
    handlers = ("actor_inf", "actor_train")
    return next((call for call in flow.calls if call.handler in handlers and "versions" in call.inputs), None)


def _with_temperatures(flow: Dataflow, config: Config) -> Dataflow:
    """Return the graph whose language models score each token at its own temperature, if agents may choose that.

    Built-in agents obey requests only where the gateway does; ``session.generate`` of other agents takes any settings.
    """
    follows_trial = config.rollout.gateway.sampling == "policy" and config.rollout.agent in AGENT.builtin
    if follows_trial or flow.rows != "rollout":
        return flow
    scores = [
        call.name for call in flow.calls if "tokens" in call.inputs and role_settings(config, call.role).head == "lm"
    ]
    calls = [replace(c, inputs=c.inputs | {TEMPERATURES}) if c.name in scores else c for c in flow.calls]
    return Dataflow(calls, flow.source_keys | {TEMPERATURES}, flow.rows) if scores else flow


def with_offload(flow: Dataflow, config: Config) -> Dataflow:
    """Return the graph with hooks that load and offload the roles with ``offload`` around each of their calls.

    With lent servers the calls of all roles load them; the master asks for the rest at the end of its turn.
    """
    calls = []
    for call in flow.calls:
        if role_settings(config, call.role).offload != "none":
            call = replace(call, pre_hooks=("onload", *call.pre_hooks))
        if own_offload(config, call.role) != "none":
            call = replace(call, post_hooks=(*call.post_hooks, "offload"))
        calls.append(call)
    return Dataflow(calls, flow.source_keys, flow.rows)


def check_calls(flow: Dataflow) -> None:
    """Check the handler and the hooks of every call; import those of the user. Raises ConfigError naming the call."""
    for call in flow.calls:
        replace(CALL_HANDLER, field=f"dataflow.{call.name}.handler").check(call.handler)
        for field, hooks in (("pre_hooks", call.pre_hooks), ("post_hooks", call.post_hooks)):
            for hook in hooks:
                replace(HOOK, field=f"dataflow.{call.name}.{field}").check(hook)


def is_supervised(config: Config) -> bool:
    """Return True if the run learns from rows of ``data.demos``, and agents play for evaluations only."""
    return dataflow_of(config).rows in ("demonstrations", "preferences")


def can_measure(flow: Dataflow) -> bool:
    """Return True if all calls that train can compute their statistics alone. A handler of the user would train."""
    return all(call.handler in _MEASURING for call in flow.calls if call.trains)


def takes_prompts(config: Config) -> bool:
    """Return True if the run trains on prompts of ``data.train``, which other runs need not have."""
    return dataflow_of(config).rows == "rollout" and not config.evaluate_only


def advantages_by_token(config: Config) -> bool:
    """Return True if a call of the graph computes one advantage per token, False if each episode has one."""
    return any("advantages" in call.outputs for call in dataflow_of(config).calls)


def token_level_advantages(config: Config) -> bool:
    """Return True if tokens of one episode have different advantages, which the call ``advantages`` computes."""
    ppo = config.train.ppo
    return ppo.critic.enabled or ppo.turn_gamma is not None or (ppo.kl.coef > 0 and ppo.kl.place == "reward")


def saved_roles(config: Config, flow: Dataflow) -> list[str]:
    """Return the roles whose weights are in no HF directory, so that checkpoints must contain them.

    These are the trained roles and, after a supervised warm-up, the roles that start with the actor's weights.
    """
    as_actor = [role for role in flow.roles if config.warmup.steps and role_settings(config, role).as_actor]
    return list(dict.fromkeys([*flow.trained_roles, *as_actor]))


# ---- settings of the model roles


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of one model role.

    path       HF directory; empty for the tiny model
    optimizer  used only if the role is trained
    as_actor   True if the role has no ``path`` and starts with the weights that the actor starts with
    """

    name: str
    path: str
    head: Literal["lm", "value"]
    offload: Offload
    optimizer: OptimizerConfig
    lora: LoraConfig = NO_LORA
    as_actor: bool = False

    def model_dir(self, paths: TrialPaths) -> Path:
        return Path(self.path) if self.path else paths.start_model


def role_settings(config: Config, role: str) -> RoleSettings:
    """Return the settings of ``role``. Raises ConfigError for a role that is not configured."""
    train, path = config.train, config.model.path
    # Ranks that leave their devices to servers leave nothing there.
    offload = "all" if lent_servers(config) else own_offload(config, role)
    if role == ACTOR:
        head: Literal["lm", "value"] = "value" if train.ppo.algorithm == REWARD_MODEL else "lm"
        return RoleSettings(ACTOR, path, head, offload, train.optimizer, train.lora)
    if role not in config.roles:
        problem = f"is called by the dataflow but not configured; add {role_field(role)}.head=lm|value"
        raise ConfigError("roles", role, problem)
    own = config.roles[role]
    optimizer = OptimizerConfig.model_validate({**train.optimizer.model_dump(), **own.optimizer})
    return RoleSettings(role, own.path or path, own.head, offload, optimizer, as_actor=not own.path)


def own_offload(config: Config, role: str) -> Offload:
    """Return what the role moves to the host between two of its calls; "none" for a role that is not configured."""
    if role == ACTOR:
        return config.train.offload
    return config.roles[role].offload if role in config.roles else "none"


def role_field(role: str) -> str:
    """Return the path of the section that configures a role other than the actor."""
    return f"roles.{role}"

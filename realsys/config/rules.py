"""Rules that span several fields, and those that need the file system or the machine. Types and bounds: schema.py.

``check`` runs before anything is written or started; ``check_made_model`` once there is the tiny model, which is made
at start. Each rule is a small function that raises ConfigError for the field to change. Rules of training are in
training_rules.py.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from realsys.agent_runner.contract import NATIVE, kind_of
from realsys.config.allocation import (
    ACTOR,
    Allocation,
    has_agents,
    has_servers,
    parse_allocation,
    servers_wanted,
)
from realsys.config.backend_rules import BackendRules, backend_rules
from realsys.config.dataflow import (
    SERVE,
    Dataflow,
    check_calls,
    dataflow_of,
    is_supervised,
    own_offload,
    role_field,
    role_settings,
    takes_prompts,
)
from realsys.config.device_plan import nodes_of, seats_of
from realsys.config.doors import (
    AGENT,
    BACKEND,
    CALL_HANDLER,
    ENVIRONMENT,
    JUDGE,
    LAYOUT,
    TRANSPORT,
    VERIFIER,
    has_steps,
)
from realsys.config.evaluation_sets import evaluation_sets, verifier_arguments, verifier_field
from realsys.config.fields import Section
from realsys.config.machine import Machine, port_range
from realsys.config.memory_check import Place, check_memory, place_of
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config, SamplingConfig
from realsys.config.schema_cluster import NameStoreConfig
from realsys.config.schema_data import AUTO_LAYOUT, HELD_OUT, DataConfig, source_problem
from realsys.config.schema_rollout import RolloutConfig
from realsys.config.schema_train import BUILT_IN_ROLES
from realsys.config.training_rules import check_training
from realsys.config.trial_sizes import lengths_that_fit, longest_sequence
from realsys.errors import MALFORMED, ConfigError, ModelError
from realsys.model_files.architecture import Head, splits_over
from realsys.model_files.config_json import read_model

#: Processes that a name store of files carries: each watch polls all keys, and each beat takes the lock of the store.
#: Beyond it the manager needs more than 5 % of a core to see the heartbeats (benchmarks/results/heartbeats.json).
MOST_WITH_FILES = 64
#: fields of ``data`` that kind=arith does not read
_OF_FILES = ("train", "eval", "mixture", "layout", "layout_args", "source_args", "demos")
_NAME_STORE = "cluster.name_store"
#: sections and fields that a run for clients does not read
_OF_AGENTS = ("rollout", "warmup", "resume", "data.train", "data.eval", "data.mixture", "data.demos", "evaluation.sets")
#: settings that change which token is drawn but not its recorded log-prob -> values that switch them off
_NOT_IN_LOGPROBS: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "penalties.repetition": (1,),
    "penalties.presence": (0,),
    "penalties.frequency": (0,),
    "min_new_tokens": (0,),
}


def check(config: Config, machine: Machine) -> Allocation:
    """Check everything that can be known before the trial folder exists. Returns the parsed allocation.

    Raises ConfigError or ModelError.
    """
    machine = machine.planned(config.cluster)
    allocation, flow = parse_allocation(config.allocation), dataflow_of(config)
    check_calls(flow)
    _check_servers(config, allocation)
    allocation.check_roles(flow.roles, config.allocation)
    _check_roles(config, flow)
    backend = backend_rules(config)
    _check_service(config, backend)
    if allocation.inference.data:
        _check_generation(config, allocation, backend)
    place = _check_machine(config, allocation, machine, backend)
    on_gpus = place.here.ranks_on_gpu, place.here.servers_on_gpu
    check_lending(config, allocation, backend, ranks_on_gpu=on_gpus[0], servers_on_gpu=on_gpus[1])
    _check_rollout(config)
    _check_sets(config)
    _check_gpus(config, machine, backend)
    _check_lengths(config)
    check_training(config, allocation, flow)
    _check_data(config)
    check_verifiers(config)
    ENVIRONMENT.check(config.rollout.environment, config.rollout.environment_args)
    _check_steps(config.rollout)
    _check_cluster(config, allocation)
    transport = TRANSPORT.make(config.weights.transport, config, config.weights.transport_args)
    if own_check := getattr(transport, "check", None):
        with TRANSPORT.guard(config.weights.transport, "check raised"):
            own_check()
    if not config.model.path:
        _check_tiny(config, allocation, flow)
    check_models(config, allocation, flow)
    check_memory(config, place)
    return allocation


def _check_roles(config: Config, flow: Dataflow) -> None:
    for role, settings in config.roles.items():
        if role not in (*BUILT_IN_ROLES, *flow.roles) or role == ACTOR:
            called = ", ".join(name for name in flow.roles if name != ACTOR) or "none but the actor"
            problem = f"is no role that the dataflow calls; it calls {called}"
            raise ConfigError(role_field(role), settings.model_dump(exclude_defaults=True), problem)


# ---- processes and machine


def _check_servers(config: Config, allocation: Allocation) -> None:
    """Let only a supervised run be without servers, and only if it samples nothing."""
    if allocation.inference.data:
        return
    if config.evaluate_only or not is_supervised(config):
        raise servers_wanted(config.allocation)
    for name, made in evaluation_sets(config).items():
        own = config.evaluation.sets.get(name)
        field = "evaluation.problems" if own is None or own.problems is None else f"evaluation.sets.{name}.problems"
        problem = f"an evaluation samples from servers, and allocation={config.allocation} has none: set it to 0"
        raise ConfigError(field, made.problems, f"{problem}, or add them, e.g. allocation=serve.d1+{config.allocation}")


def _check_service(config: Config, backend: BackendRules) -> None:
    """Refuse what a run for the clients of `realsys serve` cannot do, and settings that it would not read."""
    train, name = config.train, config.generation.backend
    if config.is_service != (train.ppo.algorithm == SERVE):
        problem = f"train.ppo.algorithm is {train.ppo.algorithm}, and both must be serve for clients: use realsys serve"
        raise ConfigError("train.loop", train.loop, problem)
    if not config.is_service:
        return
    if not train.lora.rank:
        raise ConfigError("train.lora.rank", 0, "must be set, e.g. to 32: each client trains adapters of its own")
    with BACKEND.guard(name, "adapters raised"):
        if problem := backend.adapters():
            raise ConfigError("generation.backend", name, problem)
    if config.weights.transport != "disk":
        problem = "must be disk: weights that clients sample from outlive the trainer"
        raise ConfigError("weights.transport", config.weights.transport, problem)
    if config.generation.sampling.temperature != 1:
        problem = "must be 1: clients choose it with each request"
        raise ConfigError("generation.sampling.temperature", config.generation.sampling.temperature, problem)
    if any(made.problems for made in evaluation_sets(config).values()):
        raise ConfigError("evaluation.problems", config.evaluation.problems, "must be 0: clients evaluate")
    for field in _OF_AGENTS:
        value = attrgetter(field)(config)
        section = value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
        if section:
            problem = "is not read: clients have the data, the agents and the rewards; leave it out"
            raise ConfigError(field, section, problem)


def _check_generation(config: Config, allocation: Allocation, backend: BackendRules) -> None:
    with BACKEND.guard(config.generation.backend, "check or capacity raised"):
        backend.check(allocation)
        capacity = allocation.inference.data * int(backend.capacity())
    updates = config.asynchronous
    if updates.kv_reuse_versions and updates.kv_on_update == "recompute":
        problem = "has no keys to reuse, because kv_on_update=recompute drops them at every update: set it to keep"
        raise ConfigError("asynchronous.kv_reuse_versions", updates.kv_reuse_versions, problem)
    running = config.rollout.workers * config.rollout.max_concurrent * config.rollout.sampled_episodes
    if running > capacity and has_agents(config):
        remedy = f"lower it or raise {backend.capacity_field}" if backend.capacity_field else "lower it"
        problem = (
            f"{running} completions (rollout.workers x max_concurrent x episodes per prompt) "
            f"are more than the servers run and queue ({capacity}): {remedy}"
        )
        raise ConfigError("rollout.max_concurrent", config.rollout.max_concurrent, problem)


def _check_machine(config: Config, allocation: Allocation, machine: Machine, backend: BackendRules) -> Place:
    """Place the processes on their nodes. Returns the place whose memory they share."""
    seats_of(config, machine, nodes_of(config, machine))
    with BACKEND.guard(config.generation.backend, "memory_bytes raised"):
        return place_of(config, allocation, backend, machine)


def check_lending(
    config: Config, allocation: Allocation, backend: BackendRules, *, ranks_on_gpu: bool, servers_on_gpu: bool
) -> None:
    """Refuse servers that cannot use devices of training ranks in turn with them. Raises ConfigError."""
    if not allocation.lent:
        return
    plus = "join their part with + in allocation"
    servers = "a server uses" if allocation.lent == 1 else f"{allocation.lent} servers use"
    servers += " devices of training ranks"
    if config.evaluate_only:
        raise ConfigError("allocation", config.allocation, f"an evaluation has no training ranks to share with: {plus}")
    if config.is_service:
        raise ConfigError("allocation", config.allocation, f"clients sample while others train: {plus}")
    if config.cluster.share_gpus:
        problem = f"{servers} in turn, when each side has all of the memory: set it to false"
        raise ConfigError("cluster.share_gpus", True, problem)
    if ranks_on_gpu != servers_on_gpu:
        owner = "servers" if servers_on_gpu else "training ranks"
        raise ConfigError("allocation", config.allocation, f"only {owner} have GPUs here: {plus}")
    name = config.generation.backend
    with BACKEND.guard(name, "sleeps or sizes raised"):
        sleeps, gpus = backend.sleeps(on_gpu=servers_on_gpu), backend.sizes(allocation).gpus
    if not sleeps:
        problem = f"{servers}, and this engine cannot release its memory{'' if servers_on_gpu else ' on a CPU'}"
        raise ConfigError("generation.backend", name, f"{problem}: {plus}, or use generation=embedded")
    if gpus != allocation.inference.tensor:
        problem = f"a server has {gpus} GPUs by the options of {name}, and {allocation.inference.tensor} by m"
        raise ConfigError("allocation", config.allocation, f"{problem}: set m, and remove the options")
    if not config.asynchronous.interruptible:
        problem = f"{servers}, and cannot keep completions while these compute: set it to true"
        raise ConfigError("asynchronous.interruptible", False, problem)
    for role in dict.fromkeys([ACTOR, *dataflow_of(config).roles]):
        if own_offload(config, role) == "optimizer":
            section = "train" if role == ACTOR else role_field(role)
            problem = f"{servers} in turn, and this leaves the weights there: set it to none or all"
            raise ConfigError(f"{section}.offload", "optimizer", problem)


def _check_gpus(config: Config, machine: Machine, backend: BackendRules) -> None:
    """Refuse settings that are slow on GPUs, unless the user allows them."""
    if has_servers(config):
        with BACKEND.guard(config.generation.backend, "check_machine raised"):
            backend.check_machine(machine)
    if machine.trainer_gpus and config.model.dtype == "float32" and not config.model.small_on_gpu:
        problem = "has no fast attention kernel on GPUs: set model.dtype=bfloat16"
        remedy = "model.small_on_gpu=true to use it all the same"
        raise ConfigError("model.dtype", config.model.dtype, f"{problem}, or {remedy}")


def _check_cluster(config: Config, allocation: Allocation) -> None:
    cluster = config.cluster
    light = 2 + (config.rollout.workers + config.rollout.reward.services if has_agents(config) else 0)
    processes = allocation.workers + allocation.inference.data + light
    if cluster.name_store.backend == "file" and processes > MOST_WITH_FILES:
        problem = (
            f"{processes} processes are too many for a name store of files, which carries {MOST_WITH_FILES}: "
            "use name_store=etcd"
        )
        raise ConfigError("cluster.name_store.backend", "file", problem)
    if cluster.machines > 1 and cluster.name_store.backend == "file" and not cluster.name_store.file_between_hosts:
        problem = (
            f"{cluster.machines} nodes may see its files late, and take live workers for dead: add name_store=etcd "
            "cluster.name_store.start=true, or allow it with cluster.name_store.file_between_hosts=true"
        )
        raise ConfigError("cluster.name_store.backend", "file", problem)
    if cluster.lease_s < 2 * cluster.heartbeat_s:
        problem = (
            f"must be at least twice cluster.heartbeat_s ({cluster.heartbeat_s}), or one late heartbeat kills a worker"
        )
        raise ConfigError("cluster.lease_s", cluster.lease_s, problem)
    port_range(cluster.ports)
    if cluster.name_store.backend == "etcd":
        check_etcd(cluster.name_store)
    elif cluster.name_store.start:
        raise ConfigError("cluster.name_store.start", True, "only etcd is a process: cluster.name_store.backend=etcd")
    # make a folder where the trial would make its own, and remove it: no other check finds every read-only disk
    root = Path(config.fileroot).resolve()
    existing = next(p for p in (root, *root.parents) if p.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".realsys-", dir=existing):
            pass
    except OSError as exc:
        problem = f"cannot write into {existing}: {exc.strerror}: name a folder that you can write to"
        raise ConfigError("fileroot", config.fileroot, problem) from None


def check_etcd(store: NameStoreConfig) -> None:
    """Check the addresses of etcd, the files of TLS, and the user. Raises ConfigError."""
    for address in store.address.split(","):
        host, _, port = address.rpartition(":")
        if not host or " " in address or not port.isdigit() or not 0 < int(port) < 65536:
            problem = "cannot be read: write host:port, and several with commas between them"
            raise ConfigError(f"{_NAME_STORE}.address", store.address, problem)
    if store.start and ("," in store.address or store.ca or store.user):
        problem = "starts one etcd with a certificate of its own: name one address only, and set neither ca nor user"
        raise ConfigError(f"{_NAME_STORE}.start", True, problem)
    if not store.ca and (store.cert or store.key):
        raise ConfigError(f"{_NAME_STORE}.ca", "", "must be set for TLS: name the file of etcd's authority")
    if bool(store.cert) != bool(store.key):
        raise ConfigError(f"{_NAME_STORE}.cert", store.cert, "must be set together with key")
    if store.password_file and not store.user:
        raise ConfigError(f"{_NAME_STORE}.user", "", "must be set, because password_file is")
    _check_pem_files(store)


def _check_pem_files(store: NameStoreConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    files: tuple[tuple[str, str, Callable[[], None]], ...] = (
        ("ca", store.ca, lambda: context.load_verify_locations(store.ca)),
        # a function as password: OpenSSL would ask the terminal for that of an encrypted key
        ("cert", store.cert, lambda: context.load_cert_chain(store.cert, store.key, password=lambda: "")),
    )
    for name, path, load in files:
        try:
            if path:
                load()
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            missing = next((each for each in (path, store.key) if not Path(each).is_file()), "")
            cause = f"{missing} is not a file" if missing else f"not PEM, or not a pair with key: {exc}"
            raise ConfigError(f"{_NAME_STORE}.{name}", path, f"cannot be read: {cause}") from None


# ---- agents and lengths


def _check_rollout(config: Config) -> None:
    rollout, advantage = config.rollout, config.train.ppo.advantage
    _check_agent(rollout)
    if rollout.min_episodes > rollout.group_size:
        problem = f"must not exceed rollout.group_size ({rollout.group_size})"
        raise ConfigError("rollout.min_episodes", rollout.min_episodes, problem)
    if rollout.min_episodes == 1 and "group" in (advantage.mean, advantage.std):
        raise ConfigError("rollout.min_episodes", 1, "must be at least 2: advantages are normalised per group")


def _check_agent(rollout: RolloutConfig) -> None:
    python = rollout.agent_python
    if not python:
        AGENT.check(rollout.agent, rollout.agent_args)
        if rollout.agent_process == "always" and kind_of(AGENT.load(rollout.agent))[0] == NATIVE:
            problem = f"must be auto for {rollout.agent}: an agent without base_url runs in the RolloutWorker"
            raise ConfigError("rollout.agent_process", "always", problem)
    elif rollout.agent in AGENT.builtin:
        problem = f"must be empty for the built-in agent {rollout.agent}, which runs in the RolloutWorker"
        raise ConfigError("rollout.agent_python", python, problem)
    elif rollout.agent_process == "never":
        raise ConfigError("rollout.agent_process", "never", "must be auto or always with rollout.agent_python")
    elif not os.access(python, os.X_OK) or not Path(python).is_file():
        raise ConfigError("rollout.agent_python", python, "must be the path of an interpreter that can be executed")


def _check_steps(rollout: RolloutConfig) -> None:
    """Refuse an agent that would never call reset, step and close of the environment."""
    agent = None if rollout.agent_python else AGENT.load(rollout.agent)
    if has_steps(ENVIRONMENT.load(rollout.environment)) and not getattr(agent, "plays_steps", False):
        problem = f"does not play the steps of rollout.environment={rollout.environment} (reset, step, close)"
        remedy = "use multi_turn, or set plays_steps = True in an agent class of yours that does"
        raise ConfigError("rollout.agent", rollout.agent, f"{problem}: {remedy}")


def _check_lengths(config: Config) -> None:
    sampling, longest = config.generation.sampling, longest_sequence(config)
    parts = f"data.max_prompt_tokens {config.data.max_prompt_tokens} + max_new_tokens {sampling.max_new_tokens}"
    if longest != config.data.max_prompt_tokens + sampling.max_new_tokens:
        parts = f"the longest row of rollout.agent {config.rollout.agent}"
    if sampling.min_new_tokens > sampling.max_new_tokens:
        problem = f"must not exceed max_new_tokens ({sampling.max_new_tokens})"
        raise ConfigError("generation.sampling.min_new_tokens", sampling.min_new_tokens, problem)
    if config.train.microbatch_tokens < longest:
        problem = f"one answer may have more tokens than that: {parts} = {longest}"
        raise ConfigError("train.microbatch_tokens", config.train.microbatch_tokens, problem)
    if 0 < config.train.inference_microbatch_tokens < config.train.microbatch_tokens:
        problem = f"must be at least train.microbatch_tokens ({config.train.microbatch_tokens}), or 0"
        raise ConfigError("train.inference_microbatch_tokens", config.train.inference_microbatch_tokens, problem)


def sampling_warnings(sampling: SamplingConfig) -> Iterator[str]:
    """Yield a warning if completions are drawn from another distribution than the one of the recorded log-probs."""
    values = {name: attrgetter(name)(sampling) for name in _NOT_IN_LOGPROBS}
    changed = [f"{name}={value:g}" for name, value in values.items() if value not in _NOT_IN_LOGPROBS[name]]
    if changed:
        yield (
            f"warning: generation.sampling.{', '.join(changed)}: completions are drawn from a changed distribution, "
            "but trained as if from softmax(logits / temperature): switch it off for training (docs/generation.md)"
        )


# ---- data and evaluation


def _check_data(config: Config) -> None:
    data = config.data
    held_out = [made for made in evaluation_sets(config).values() if made.split == HELD_OUT]
    if config.warmup.steps and is_supervised(config):
        algorithm = f"train.ppo.algorithm={config.train.ppo.algorithm}"
        problem = f"must be 0: {algorithm} learns from data.demos itself; use realsys chain for a stage before it"
        raise ConfigError("warmup.steps", config.warmup.steps, problem)
    if data.order == "script":
        if config.train.loop in ("train", "evaluate"):
            problem = "needs a loop that submits rows: set train.loop=FILE.py, or use realsys.Session"
            raise ConfigError("data.order", "script", problem)
        chosen = "must be {} with data.order=script: the training script chooses the prompts"
        if config.train.total_epochs:
            raise ConfigError("train.total_epochs", config.train.total_epochs, chosen.format(0))
        if data.curriculum.enabled:
            raise ConfigError("data.curriculum", data.curriculum.model_dump(), chosen.format("off (min=0, max=1)"))
    if data.kind == "arith":
        for name in _OF_FILES:
            if (value := getattr(data, name)) != DataConfig.model_fields[name].default:
                problem = "is not read, because data.kind=arith makes its own data: set data.kind=jsonl"
                remedy = "and model.path, or experiment=math in place of experiment=arith"
                raise ConfigError(f"data.{name}", value, f"{problem}, {remedy}")
        arith = data.arith
        if arith.max_operands < arith.min_operands:
            problem = f"must be at least min_operands ({arith.min_operands})"
            raise ConfigError("data.arith.max_operands", arith.max_operands, problem)
        wanted = max((made.problems for made in held_out), default=0)
        if wanted > arith.eval_size and not config.evaluate_only:
            raise ConfigError(
                "evaluation.problems", wanted, f"only data.arith.eval_size={arith.eval_size} are held out"
            )
        if config.warmup.steps and arith.demo_size < config.warmup.batch:
            raise ConfigError("data.arith.demo_size", arith.demo_size, f"warmup.batch needs {config.warmup.batch}")
        if arith.second_tries and not arith.feedback:
            raise ConfigError("data.arith.feedback", "", "must be set: second_tries demonstrates it")
        if config.train.total_epochs * arith.train_size < config.train.batch_groups and config.train.total_epochs:
            raise ConfigError("data.arith.train_size", arith.train_size, "is less than one batch (train.batch_groups)")
        return
    has_copy = TrialPaths.of(config).data_sources.is_file()
    check_sources(data, has_copy=has_copy, trains=takes_prompts(config), evaluates=bool(held_out))
    if config.warmup.steps and not data.demos:
        raise ConfigError("data.demos", "", "the supervised warm-up (warmup.steps) needs demonstrations")
    if is_supervised(config) and not data.demos:
        algorithm = f"train.ppo.algorithm={config.train.ppo.algorithm}"
        raise ConfigError("data.demos", "", f"{algorithm} learns from {dataflow_of(config).rows}: name a file")
    if data.demos and not TrialPaths.of(config).demos.is_file() and (problem := source_problem(data.demos)):
        raise ConfigError("data.demos", data.demos, problem)
    if held_out and not data.eval and not data.eval_fraction:
        raise ConfigError("data.eval_fraction", 0.0, "nothing is held out; name data.eval or set evaluation.problems=0")


def check_sources(data: DataConfig, *, has_copy: bool = False, trains: bool = True, evaluates: bool = True) -> None:
    """Check sources and layouts. ``has_copy``: the trial has its own copy of the data, so the sources may be gone.

    ``trains`` False: ``data.eval`` alone is enough, and if ``evaluates`` is False, too, nothing is needed. Raises
    ConfigError.
    """
    if data.mixture and data.train:
        raise ConfigError("data.train", data.train, "must be empty, because data.mixture names the sources")
    if not data.mixture and not data.train and (trains or (evaluates and not data.eval)):
        raise ConfigError("data.train", "", "name a JSONL file with prompt and answer on every line, or docs/data.md")
    named = [("data.train", data.train, data.layout, data.layout_args), ("data.eval", data.eval, data.layout, {})]
    named += [(f"data.mixture[{i}].path", s.path, s.layout, s.layout_args) for i, s in enumerate(data.mixture)]
    for field, source, layout, arguments in named:
        if source and not has_copy and (problem := source_problem(source)):
            raise ConfigError(field, source, problem)
        if layout != AUTO_LAYOUT:
            LAYOUT.check(layout, arguments)
        elif arguments:
            raise ConfigError(f"{field.rpartition('.')[0]}.layout", layout, "name the layout that takes layout_args")


def _check_sets(config: Config) -> None:
    """Check the data sets of evaluations. A trial with its own copy of their data needs their sources no more."""
    has_copy = TrialPaths.of(config).config.is_file()
    for name, made in evaluation_sets(config).items():
        field = f"evaluation.sets.{name}"
        if made.source is None:
            continue
        if not has_copy and (problem := source_problem(made.source.path)):
            raise ConfigError(f"{field}.path", made.source.path, problem)
        if made.source.layout != AUTO_LAYOUT:
            LAYOUT.check(made.source.layout, made.source.layout_args)
        elif made.source.layout_args:
            raise ConfigError(f"{field}.layout", AUTO_LAYOUT, "name the layout that takes layout_args")


def check_verifiers(config: Config) -> None:
    """Check the verifiers of the trial and their settings. Raises ConfigError."""
    for name, arguments in verifier_arguments(config).items():
        if name in JUDGE.builtin:
            JUDGE.load(name).check(config)
        else:
            door = VERIFIER.at(verifier_field(config, name))
            door.check(name, dict(arguments))
            door.check_settings(name, arguments, config)


# ---- models


def check_models(config: Config, allocation: Allocation, flow: Dataflow) -> None:
    """Check the model of every role that has a directory already, against where the role sits."""
    for role in flow.roles:
        settings = role_settings(config, role)
        if not settings.path:
            continue
        own = settings.path != config.model.path
        field = f"{role_field(role)}.path" if own else "model.path"
        scored = check_model(Path(settings.path), config, allocation, role=role, head=settings.head, field=field)
        if settings.head == "value" and not scored and role not in flow.trained_roles:
            problem = "is a language model without score.weight, and the role is not trained: all its values would be 0"
            raise ConfigError(f"{role_field(role)}.path", settings.path, problem)
    if config.model.path:
        _check_vocabularies(Path(config.model.path), config, flow)


def check_made_model(path: Path, config: Config, allocation: Allocation, flow: Dataflow) -> None:
    """Check the model that was made on the spot for every role that uses it. Raises ConfigError or ModelError."""
    for role in _roles_of_made_model(config, flow):
        check_model(path, config, allocation, role=role)
    _check_vocabularies(path, config, flow)


def check_model(
    path: Path,
    config: Config,
    allocation: Allocation,
    *,
    role: str = ACTOR,
    head: Head = "lm",
    field: str = "model.path",
) -> bool:
    """Check an HF model directory against what ``role`` needs, the layouts and the lengths.

    ``field`` is where the configuration names it. Returns whether it has a score.weight.
    Raises ConfigError or ModelError.
    """
    if not path.is_dir():
        fetch = "fetch a model of the Hugging Face Hub with `hf download ORGANISATION/NAME --local-dir DIR`"
        problem = f"is not a directory: name a local one; nothing is downloaded, so {fetch}"
        raise ConfigError(field, str(path), problem)
    model = read_model(path, head)
    for pattern in ("tokenizer.json", "*.safetensors"):
        if not any(file.is_file() for file in path.glob(pattern)):
            raise ModelError(f"{field}={str(path)!r}: there is no {pattern} in it")
    _check_layers(model.layers, config, allocation, role, str(path))
    _check_sizes(model.split_sizes, config, allocation, role, str(path))
    _check_positions(model.positions, config, str(path))
    return model.has_score


def _check_tiny(config: Config, allocation: Allocation, flow: Dataflow) -> None:
    if config.data.kind != "arith":
        raise ConfigError("model.path", "", "name a HF model directory; only data.kind=arith makes a model of its own")
    tiny = config.model.tiny
    if tiny.num_attention_heads % tiny.num_key_value_heads:
        problem = f"must divide model.tiny.num_attention_heads ({tiny.num_attention_heads})"
        raise ConfigError("model.tiny.num_key_value_heads", tiny.num_key_value_heads, problem)
    if tiny.head_dim % 2:
        raise ConfigError("model.tiny.head_dim", tiny.head_dim, "must be even")
    sizes = {name: getattr(tiny, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    for role in _roles_of_made_model(config, flow):
        _check_layers(tiny.num_hidden_layers, config, allocation, role, "the tiny model")
        _check_sizes(sizes, config, allocation, role, "the tiny model")
    _check_positions(tiny.max_position_embeddings, config, "the tiny model")


def _roles_of_made_model(config: Config, flow: Dataflow) -> list[str]:
    """The actor, whom the warm-up trains whatever the dataflow calls, first."""
    return [role for role in dict.fromkeys([ACTOR, *flow.roles]) if not role_settings(config, role).path]


def _check_sizes(sizes: dict[str, int], config: Config, allocation: Allocation, role: str, model: str) -> None:
    """Check that tensor parallelism divides each of ``sizes``, for the role and for the inference part."""
    training, inference = allocation.placement(role).layout.tensor, allocation.inference.tensor
    for part, tensor in ((_part(role), training), ("the inference part", inference)):
        for name, size in sizes.items():
            if not splits_over(name, size, tensor):
                problem = f"{name} {size} of {model} does not divide by m{tensor} of {part}"
                raise ConfigError("allocation", config.allocation, problem)


def _check_layers(layers: int, config: Config, allocation: Allocation, role: str, model: str) -> None:
    stages = allocation.placement(role).layout.pipeline
    if layers < stages:
        problem = f"{layers} layers of {model} are fewer than p{stages} of {_part(role)}"
        raise ConfigError("allocation", config.allocation, problem)


def _part(role: str) -> str:
    return "the training part" if role == ACTOR else f"role {role}"


def _check_positions(positions: int, config: Config, model: str) -> None:
    longest = longest_sequence(config)
    if longest <= positions:
        return
    tokens, limit = config.generation.sampling.max_new_tokens, config.rollout.agent_limits.max_tokens
    fields = {"data.max_prompt_tokens": config.data.max_prompt_tokens, "generation.sampling.max_new_tokens": tokens}
    if longest == sum(fields.values()):
        prompt, answer = lengths_that_fit(positions)
        problem = f"prompt + answer may have {longest} tokens: set data.max_prompt_tokens={prompt}"
        problem += f" generation.sampling.max_new_tokens={answer}, for example"
        field = "generation.sampling.max_new_tokens"
    else:
        fields = {"rollout.agent_limits.max_tokens": limit} if longest == limit else fields
        problem = f"the longest row of rollout.agent {config.rollout.agent} has {longest} tokens: lower this"
        field = max(fields, key=lambda name: fields[name])
    raise ConfigError(field, fields[field], f"{model} has {positions} positions, {problem}")


# ---- vocabularies: all models must give the actor's token ids the same meaning, because no text is tokenised again


def _check_vocabularies(actor: Path, config: Config, flow: Dataflow) -> None:
    """Check every role that a built-in handler runs: it reads the token ids of the actor."""
    if (top_k := config.train.ppo.top_k) > (vocabulary := read_model(actor, "value").vocab):
        raise ConfigError("train.ppo.loss_args.top_k", top_k, f"must not exceed the vocabulary's {vocabulary} tokens")
    builtin = (call.role for call in flow.calls if call.handler in CALL_HANDLER.builtin and call.role != ACTOR)
    for role in dict.fromkeys(builtin):
        own = role_settings(config, role).path
        if own and own != config.model.path:
            check_vocabulary(f"{role_field(role)}.path", Path(own), actor)


def check_vocabulary(field: str, model: Path, actor: Path) -> None:
    """Check that every token id of ``actor`` is the same token in ``model``, which may have more tokens.

    ``model`` and ``actor`` are HF directories that were checked before; ``field`` is the field of ``model``. Raises
    ConfigError for an id that is missing or another token, and ModelError for a file that cannot be read.
    """
    theirs, ours = (read_model(directory, "value").vocab for directory in (model, actor))
    if theirs < ours:
        problem = f"vocab_size {theirs} is less than the actor's {ours} ({actor}): it has no embedding for some tokens"
        raise ConfigError(field, str(model), problem)
    own, other = (_read(path / "tokenizer.json") for path in (actor, model))
    if own == other:
        return
    tokens = _tokens(other, model / "tokenizer.json")
    for number, token in sorted(_tokens(own, actor / "tokenizer.json").items()):
        if (its_token := tokens.get(number)) != token:
            difference = "missing" if its_token is None else repr(its_token)
            problem = f"tokenizer differs from that of the actor ({actor}): token {number}, {token!r}, is {difference}"
            raise ConfigError(field, str(model), problem)


def _tokens(raw: bytes, path: Path) -> dict[int, str]:
    """Return id -> token of a tokenizer.json. Added tokens have a separate list and may be in the vocabulary too."""
    content = _decoded(raw, path)
    try:
        vocab = content["model"]["vocab"]
        tokens = (
            {int(number): token for token, number in vocab.items()}
            if isinstance(vocab, dict)
            else {number: entry[0] for number, entry in enumerate(vocab)}
        )
        return tokens | {int(added["id"]): added["content"] for added in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: vocabulary cannot be read: {type(error).__name__}: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _decoded(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except MALFORMED as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None

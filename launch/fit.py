"""Sets what the user left open so that it fits the model, the data and the machine.

    cluster.nodes, ...                 as the launcher finds them (Launcher.settings)
    generation.backend                 sglang, if there are GPUs
    train.recompute                    the fewest layers with which the ranks fit their GPUs; also if it is set to auto
    train.head_chunk_tokens, ...       what saves memory, and logits in fp32, if the ranks train on GPUs; on several
                                       nodes also train.overlap_grad_reduce
    allocation: auto                   a quarter of the GPUs trains, or as many as memory demands, the others generate;
                                       with one GPU a server and a rank use it in turn; without GPUs, one process each;
                                       all train in a supervised run that samples no evaluation
    cluster.share_gpus                 true, if the allocation is auto and there is one GPU, on which server and rank
                                       cannot take turns
    backend's share of a shared GPU    what the predicted memory of a rank leaves, or an even split if that is unknown;
                                       on a GPU that they use in turn all but the libraries of a rank
                                       (BackendRules.sharing)
    data.max_prompt_tokens,            the model's positions, if the defaults do not fit: a quarter for the prompt
    generation.sampling.max_new_tokens
    evaluation.problems                the held-out problems, if there are fewer; 0 without servers
    rollout.workers                    with GPUs: as many as fill the caches of the servers
    weights.storage_readers            2, if servers run on four or more nodes
    backend's room for keys of turns   with an agent of several turns: for the episodes that wait, in a quarter of the
                                       memory that is left (BackendRules.holding)

A setting is left open if neither the command line nor a file of the user's choice names it, and it has the default of
the schema. Every setting that is chosen here is shown, and is written to config.json like any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from realsys.config.allocation import AUTO, has_agents, has_servers, parse_allocation
from realsys.config.backend_rules import backend_rules, sizes_of
from realsys.config.dataflow import dataflow_of, is_supervised
from realsys.config.device_memory import GIB, left_by_ranks
from realsys.config.device_plan import gpus_of_torch, nodes_of, seats_of
from realsys.config.doors import BACKEND
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.fields import replaced
from realsys.config.machine import Machine
from realsys.config.memory_check import (
    largest_rank,
    owners_beside_servers,
    place_of,
    running_sequences,
    server_share,
    spare_bytes,
)
from realsys.config.memory_remedies import HEAD_CHUNK, least_recompute, smallest_training, training_alone
from realsys.config.paths import TrialPaths
from realsys.config.rules import check_lending
from realsys.config.schema import Config
from realsys.config.schema_data import source_problem
from realsys.config.training_rules import can_shard_optimizers
from realsys.config.trial_sizes import lengths_that_fit, longest_sequence
from realsys.errors import ConfigError
from realsys.launch.launchers.contract import launcher_settings
from realsys.model_files.config_json import read_model

_BACKEND, _GPU_BACKEND = "generation.backend", "sglang"
_PROMPT, _ANSWER = "data.max_prompt_tokens", "generation.sampling.max_new_tokens"
_EVALUATION = "evaluation.problems"
_SHARE_GPUS, _IN_TURN = "cluster.share_gpus", "serve.d1|d1"
_WAITING_SHARE = 0.05  # of a GPU of unknown size, for the libraries of a training rank that waits for its turn
_RECOMPUTE = "train.recompute"
_WORKERS, _READERS = "rollout.workers", "weights.storage_readers"
_EPISODES = 256  # most episodes of a server: SGLang has CUDA graphs of up to as many on GPUs of 80 GB
_UNKNOWN_EPISODES = 64  # episodes of a server whose cache is not known
_SPARE_PARTS = 4  # one of these equal parts of the free memory is for keys of episodes that wait
_FEW = 2  # hosts that read a version from the shared storage; not one, because it may hang


def fit(config: Config, given: Collection[str], machine: Machine) -> tuple[Config, list[str]]:
    """Return the configuration with the open settings chosen, and a line for each.

    ``given``: keys of the command line and of chosen files. Data files that do not exist are left to the checks.
    Raises ConfigError, DataError or ModelError.
    """
    # what the launcher knows, such as the nodes of an allocation
    values = launcher_settings(config).items()
    config, nodes = _set(config, {field: chosen for field, chosen in values if _is_open(config, given, field)})
    machine = machine.planned(config.cluster)
    config, backend = _set(config, _backend(config, given, machine))
    config, memory = _set(config, _memory(config, given, machine))
    config, places = _set(config, _allocation(config, given, machine))
    config, sizes = _set(config, _lengths(config, given) | _evaluations(config, given))
    config, layers = _set(config, _recompute(config, machine))
    config, shares = _set(config, _sharing(config, machine))
    config, workers = _set(config, _rollout_workers(config, given, machine))
    config, readers = _set(config, _storage_readers(config, given))
    config, rows = _set(config, _held_episodes(config, given, machine))
    memory = [line for line in memory if not line.startswith(f"set {_RECOMPUTE}={AUTO}:")] + layers
    return config, nodes + backend + memory + places + sizes + shares + workers + readers + rows


def _set(config: Config, chosen: Mapping[str, tuple[Any, str]]) -> tuple[Config, list[str]]:
    """Set fields to their (value, reason)."""
    for field, (value, _) in chosen.items():
        config = replaced(config, field.split("."), value)
    return config, [f"set {field}={value}: {reason}" for field, (value, reason) in chosen.items()]


def _is_open(config: Config, given: Collection[str], field: str) -> bool:
    parts = field.split(".")
    named = any(".".join(parts[:length]) in given for length in range(1, len(parts) + 1))
    return not named and _at(config, parts) == _at(Config(), parts)


def _backend(config: Config, given: Collection[str], machine: Machine) -> dict[str, tuple[Any, str]]:
    """Choose the fast engine, unless the experiment asks for the embedded one on GPUs."""
    if not (machine.gpus and _generates(config)) or config.model.small_on_gpu or not _is_open(config, given, _BACKEND):
        return {}
    owner = "the nodes have" if config.cluster.nodes else "this machine has"
    return {_BACKEND: (_GPU_BACKEND, f"{owner} GPUs")}


def _memory(config: Config, given: Collection[str], machine: Machine) -> dict[str, tuple[Any, str]]:
    """Save memory on GPUs. Without this, a model of 1.5B with sequences of 28k tokens needs more than 80 GB."""
    if not gpus_of_torch(config, machine) and not config.cluster.gpu_memory_gb:
        return {}
    chosen: dict[str, tuple[Any, str]] = {
        _RECOMPUTE: (AUTO, "kept activations take most of the memory"),
        "train.head_chunk_tokens": (HEAD_CHUNK, "on GPUs, the logits of a whole micro-batch take gigabytes"),
        "train.sequence_parallel": (True, "tensor ranks share what lies between their layers, without cost"),
    }
    if config.model.dtype == "bfloat16":
        chosen["model.head_dtype"] = ("float32", "logits in bf16 differ between trainer and servers")
    if config.cluster.nodes > 1:
        chosen["train.overlap_grad_reduce"] = (True, "the network between nodes is slower than that of a node")
    if can_shard_optimizers(config, dataflow_of(config)):
        chosen["train.distributed_optimizer"] = (True, "data ranks share the optimizer's state, almost without cost")
    return {field: choice for field, choice in chosen.items() if _is_open(config, given, field)}


def _recompute(config: Config, machine: Machine) -> dict[str, tuple[Any, str]]:
    """Turn ``auto`` into the fewest layers, and into all of them if memory is not known or is shared with a server."""
    if config.train.recompute != AUTO:
        return {}
    gpu_bytes = 0 if config.evaluate_only else _gpu_bytes(config, machine)
    if not gpu_bytes or not (gpus_of_torch(config, machine) or config.cluster.gpu_memory_gb):
        return {_RECOMPUTE: (True, "the memory of the training ranks is not known")}
    if config.cluster.share_gpus:
        return {_RECOMPUTE: (True, "servers share the GPUs of the training ranks")}
    number = least_recompute(config, gpu_bytes)
    if number is None:
        return {_RECOMPUTE: (True, f"with fewer layers too little of {gpu_bytes / GIB:.0f} GiB stays free")}
    rank = largest_rank(replaced(config, _RECOMPUTE.split("."), number))
    reason = f"the first layers of each stage; a training rank needs {rank / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB"
    return {_RECOMPUTE: (number, reason)}


def _allocation(config: Config, given: Collection[str], machine: Machine) -> dict[str, tuple[Any, str]]:
    if config.allocation != AUTO:
        return {}
    gpus, nodes = gpus_of_torch(config, machine), config.cluster.nodes
    owner = "this machine has" if not nodes else f"the {nodes} nodes have" if nodes > 1 else "the node has"
    reason = f"{owner} {gpus or 'no'} GPU{'s' * (gpus != 1)}{' for torch' * (gpus < 2)}"
    if not _generates(config):
        size = _gpu_bytes(config, machine) if gpus else 0
        text = training_alone(config, gpus, size) if size else None
        return {"allocation": (text or f"d{gpus or 1}", f"{reason}, and nothing is sampled")}
    if gpus >= 2:
        if gpu_bytes := _gpu_bytes(config, machine):
            found = smallest_training(config, gpus, gpu_bytes)
            if found is not None:
                return {"allocation": (found, f"{reason} of {gpu_bytes / GIB:.0f} GiB")}
        width = sizes_of(config, parse_allocation("serve.d1+d1")).gpus
        servers = max(1, (gpus - max(1, gpus // 4)) // width)
        return {"allocation": (f"serve.d{servers}+d{max(1, gpus - servers * width)}", reason)}
    if gpus != 1 or not _is_open(config, given, _SHARE_GPUS):
        return {"allocation": ("serve.d1+d1", reason)}
    if _can_take_turns(config):
        return {"allocation": (_IN_TURN, f"{reason}, which server and training rank use in turn")}
    return {"allocation": ("serve.d1+d1", reason), _SHARE_GPUS: (True, reason)}


def _generates(config: Config) -> bool:
    """Return False if the run has no servers, or would have none with ``allocation=auto``."""
    if config.allocation == AUTO and is_supervised(config):
        return bool(evaluation_sets(config))
    return has_servers(config)


def _can_take_turns(config: Config) -> bool:
    """Return True if a server and a training rank can use one GPU in turn."""
    config = replaced(config, ["allocation"], _IN_TURN)
    try:
        allocation, backend = parse_allocation(_IN_TURN), backend_rules(config)
        check_lending(config, allocation, backend, ranks_on_gpu=True, servers_on_gpu=True)
    except ConfigError:
        return False
    return config.weights.transport != "group"


def _gpu_bytes(config: Config, machine: Machine) -> int:
    """Return the memory of one GPU, if the model's need can be predicted; else 0."""
    return _gpu_size(config, machine) if (Path(config.model.path) / "config.json").is_file() else 0


def _gpu_size(config: Config, machine: Machine) -> int:
    return int(config.cluster.gpu_memory_gb * GIB) or (0 if config.cluster.nodes else machine.gpu_bytes)


def _sharing(config: Config, machine: Machine) -> dict[str, tuple[Any, str]]:
    """Bound what the backend takes of a GPU that its server shares."""
    allocation = parse_allocation(config.allocation)
    if not (config.cluster.share_gpus or allocation.lent):
        return {}
    gpus = owners_beside_servers(seats_of(config, machine, nodes_of(config, machine)))
    most = max(map(sum, gpus), default=1)
    if most < 2:
        return {}
    reason, rank_share = f"up to {most} processes share a GPU", None
    if allocation.lent:
        left, size = left_by_ranks(allocation), _gpu_size(config, machine)
        reason, rank_share = "servers and ranks use GPUs in turn", left / size if size else _WAITING_SHARE
        reason += f"; a rank that waits keeps about {left / GIB:.1f} GiB of libraries"
    elif (gpu_bytes := _gpu_bytes(config, machine)) and gpus_of_torch(config, machine):
        rank_share = (rank := largest_rank(config)) / gpu_bytes
        reason += f"; a rank needs about {rank / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB"
    share = server_share(gpus, rank_share)
    with BACKEND.guard(config.generation.backend, "sharing raised"):
        values = backend_rules(config).sharing(share)
    return {field: (value, reason) for field, value in values.items()}


def _rollout_workers(config: Config, given: Collection[str], machine: Machine) -> dict[str, tuple[Any, str]]:
    """Start enough RolloutWorkers to keep all servers on GPUs busy, and no more than admission lets run."""
    if not (machine.gpus and has_agents(config)) or not _is_open(config, given, _WORKERS):
        return {}
    rollout, servers = config.rollout, parse_allocation(config.allocation).inference.data
    size, of_worker, admitted = rollout.sampled_episodes, rollout.max_concurrent, _admitted(config)
    episodes = _episodes(config, machine)
    served = math.ceil(servers * episodes / size)
    with BACKEND.guard(config.generation.backend, "capacity raised"):
        held = servers * int(backend_rules(config).capacity()) // (of_worker * size)
    workers = min(math.ceil(min(admitted, served) / of_worker), held)
    if workers <= rollout.workers:
        return {}
    limit = f"{servers} servers run {episodes} episodes each" if served <= admitted else "staleness admits no more"
    return {_WORKERS: (workers, f"{min(admitted, served):,} groups of {size}, {of_worker} in a worker; {limit}")}


def _episodes(config: Config, machine: Machine) -> int:
    """Return how many episodes one server should run: what its cache and its rows hold."""
    allocation, backend = parse_allocation(config.allocation), backend_rules(config)

    def cached() -> int:
        if not _gpu_bytes(config, machine):
            return _UNKNOWN_EPISODES
        return running_sequences(config, place_of(config, allocation, backend, machine))

    with BACKEND.guard(config.generation.backend, "running raised"):
        return max(1, min(_EPISODES * sizes_of(config, allocation).data, int(backend.running(cached))))


def _admitted(config: Config) -> int:
    """Return how many groups admission lets run at the same version of the weights."""
    return (config.asynchronous.max_staleness + 1) * config.train.batch_groups


def _held_episodes(config: Config, given: Collection[str], machine: Machine) -> dict[str, tuple[Any, str]]:
    """Let servers hold the keys of all episodes in progress, if the agent has several turns."""
    if (config.model.path and not (Path(config.model.path) / "config.json").is_file()) or not has_agents(config):
        return {}
    rollout, allocation, backend = config.rollout, parse_allocation(config.allocation), backend_rules(config)
    groups = rollout.workers * rollout.max_concurrent
    if not config.evaluate_only:
        groups = min(groups, _admitted(config))
    episodes = math.ceil(groups * rollout.sampled_episodes / allocation.inference.data)

    def spare() -> int:
        return spare_bytes(config, place_of(config, allocation, backend, machine)) // _SPARE_PARTS

    with BACKEND.guard(config.generation.backend, "holding raised"):
        values = backend.holding(episodes, spare)
    reason = f"{episodes} episodes of several turns in progress at each server"
    return {field: (value, reason) for field, value in values.items() if _is_open(config, given, field)}


def _lengths(config: Config, given: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Fit the longest row into the model's positions. Of another agent's row only the prompt is shortened."""
    if not (Path(config.model.path) / "config.json").is_file():
        return {}
    prompt, answer = config.data.max_prompt_tokens, config.generation.sampling.max_new_tokens
    positions, longest = read_model(Path(config.model.path)).positions, longest_sequence(config)
    is_open = [_is_open(config, given, field) for field in (_PROMPT, _ANSWER)]
    if longest <= positions or not any(is_open):
        return {}
    reason = f"the model has {positions} positions"
    if longest != prompt + answer:
        shorter = prompt - (longest - positions)
        fits = shorter > 0 and longest_sequence(replaced(config, _PROMPT.split("."), shorter)) <= positions
        reason += f", and {config.rollout.agent} needs {longest - prompt} of them after the prompt"
        return {_PROMPT: (shorter, reason)} if is_open[0] and fits else {}
    if all(is_open):
        prompt, answer = lengths_that_fit(positions, prompt)
    elif is_open[0]:
        prompt = min(prompt, positions - answer)
    else:
        answer = positions - prompt
    if prompt < 1 or answer < 1:
        return {}  # the user's limit alone is too large, and the check refuses it
    values = {_PROMPT: prompt, _ANSWER: answer}
    return {field: (value, reason) for field, value in values.items() if value != _at(config, field.split("."))}


def _evaluations(config: Config, given: Collection[str]) -> dict[str, tuple[Any, str]]:
    if not has_servers(config) and _is_open(config, given, _EVALUATION):
        return {_EVALUATION: (0, f"allocation={config.allocation} has no servers to sample from")}
    sources = [config.data.train, config.data.eval, *(source.path for source in config.data.mixture)]
    named = [source for source in sources if source]
    if config.data.kind != "jsonl" or not _is_open(config, given, _EVALUATION) or not named or config.evaluate_only:
        return {}
    paths = TrialPaths.of(config)
    if not paths.data_sources.is_file() and any(map(source_problem, named)):
        return {}
    from realsys.data.convert import count_held_out

    wanted = config.evaluation.problems
    held_out = count_held_out(config, paths, wanted)
    return {_EVALUATION: (held_out, f"{held_out} problems are held out")} if 0 < held_out < wanted else {}


def _storage_readers(config: Config, given: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Let few hosts read a version from the shared storage, and the others from those. Up to three read it as fast."""
    if config.cluster.nodes < 2 * _FEW or not _is_open(config, given, _READERS):
        return {}
    hosts = min(config.cluster.nodes, parse_allocation(config.allocation).inference.data)
    if hosts < 2 * _FEW:
        return {}
    return {_READERS: (_FEW, f"servers on up to {hosts} nodes; the other nodes read a version from nodes that have it")}


def _at(section: Any, parts: list[str]) -> Any:
    return functools.reduce(getattr, parts, section)

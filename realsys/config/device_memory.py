"""Predicted bytes on each device, and in the memory of each host. No torch: every number is computed from the sizes.

    rank_memory ──> rank_uses ───┐
                    server_use ──┼──> memory_check, memory_remedies    what does not fit is refused
    host processes ─> host_use ──┘    memory_remedies                  allocation=auto
                                      memory_check                     realsys run --dry-run

The peak of a rank is that of the most demanding call of any of its roles. While one role computes, the others have
what their ``offload`` leaves on the device. If servers and ranks use a device in turn, each side has in its turn all
but the libraries of the other. Without GPUs, the host needs the memory of the greater turn.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from realsys.config.allocation import ACTOR, Allocation, ParallelLayout
from realsys.config.backend_rules import GPU_SHARE, backend_rules, sizes_of
from realsys.config.dataflow import Dataflow, RoleSettings, own_offload, role_settings, saved_roles
from realsys.config.rank_memory import (
    BYTES,
    FP32,
    PhasePeak,
    States,
    StateSettings,
    StepSettings,
    inference_work,
    shard_of,
    states_of,
    training_work,
)
from realsys.config.schema import Config
from realsys.config.trial_sizes import batch_tokens, longest_sequence, model_of
from realsys.model_files.architecture import HfModel

GIB = 1 << 30
#: CUDA context with its kernels and cuBLAS, on each GPU of a process; and the buffers of one communicator of NCCL
LIBRARIES, COMMUNICATOR = GIB, 2 * GIB // 5
#: communicators of a rank by the number of axes of its layout with several ranks: one for each axis and all ranks,
#: with three axes also those of a stage and of a data rank (``realsys.train.megatron.mesh``)
_COMMUNICATORS = (0, 1, 3, 6)
MOST_ADAPTERS = 8  # that a server of a training service has loaded; an embedded engine for each
_STORED_TOKEN = 16  # bytes of token, log-prob and random number of a position in the embedded engine
_SAMPLED = 4  # fp32 tensors over the vocabulary that sampling holds per sequence
_TORCH_PROCESS = 600 << 20  # resident memory of a process that has imported torch and Megatron
_CUDA_PROCESS = 3 << 30  # the same with a CUDA context, which maps its libraries into host memory
_LIGHT_PROCESS = 120 << 20
#: pinned buffers are rounded up to powers of two: 1 / ln 2 on average
_PINNED = 1.44


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Predicted bytes on one device at its peak. ``owner``: its process, or processes that are alike.

    others    what the rank's other roles leave on the device
    layers    activations and temporaries of the decoder layers, ``head`` those of the output head
    step      temporaries of the optimizer's step, if they are the peak
    cache     keys and values
    waiting   libraries of the process that waits for its turn on the device
    """

    owner: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    others: int = 0
    layers: int = 0
    head: int = 0
    step: int = 0
    cache: int = 0
    libraries: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "owner"}


def usable_bytes(config: Config, gpu_bytes: int, *, server: bool) -> int:
    """Return how much of a GPU the plan may use."""
    return int(gpu_bytes * (backend_rules(config).gpu_share() if server else GPU_SHARE))


# ---- training ranks


def rank_uses(config: Config, allocation: Allocation, flow: Dataflow, *, on_gpu: bool) -> list[tuple[DeviceUse, int]]:
    """Return the use of each kind of rank, with the number of such ranks. Raises ModelError.

    Ranks are alike if they are on the same pipeline stage of the same roles. Without a GPU the memory is the host's.
    """
    roles = list(dict.fromkeys([ACTOR, *flow.roles]))
    alike: dict[tuple[tuple[tuple[str, int], ...], bool], list[int]] = {}
    for worker in range(allocation.workers):
        stages = tuple((role, stage) for role in roles if (stage := _stage(allocation, role, worker)) is not None)
        alike.setdefault((stages, worker in allocation.lending), []).append(worker)
    found: dict[tuple[str, int], _RoleOnRank] = {}
    uses = []
    for (stages, lends), workers in alike.items():
        for role, stage in stages:
            if (role, stage) not in found:
                found[role, stage] = _role_on_rank(config, allocation, flow, role, stage, on_gpu=on_gpu)
        owner = f"model_worker/{workers[0]}" + (f"-{workers[-1]}" if len(workers) > 1 else "")
        owner += " while servers sleep" if lends else ""
        use = _peak(owner, [found[key] for key in stages], _rank_libraries(allocation, workers[0]) if on_gpu else 0)
        waiting = _server_libraries(allocation) if on_gpu and lends else 0
        uses.append((replace(use, waiting=waiting), len(workers)))
    return uses


@dataclass(frozen=True, slots=True)
class _RoleOnRank:
    """One role on one rank: its states, and the peaks of its calls."""

    states: States
    peaks: tuple[DeviceUse, ...]
    offload: str


def _role_on_rank(
    config: Config, allocation: Allocation, flow: Dataflow, role: str, stage: int, *, on_gpu: bool
) -> _RoleOnRank:
    settings, layout, model = role_settings(config, role), allocation.placement(role).layout, model_of(config, role)
    trains = role in flow.trained_roles or (role == ACTOR and config.warmup.steps > 0)
    shard = shard_of(model, layout, stage)
    state_settings = StateSettings(config.model.dtype, trains, config.train.distributed_optimizer, on_gpu)
    states = states_of(model, shard, layout, settings, state_settings)
    how = step_settings(config, settings, layout.data, on_gpu=on_gpu)
    works = [inference_work(model, shard, layout, how)]
    if trains:
        works.append(training_work(model, shard, layout, how, stage))
    peaks = [_use(states, work) for work in works]
    if trains:
        peaks.append(_use(states, PhasePeak(), step=states.temporary))
    return _RoleOnRank(states, tuple(peaks), own_offload(config, role))


def _peak(owner: str, roles: list[_RoleOnRank], libraries: int) -> DeviceUse:
    """Return the peak over the calls of all roles."""
    left = sum(role.states.left(role.offload) for role in roles)
    best = DeviceUse(owner)
    for role in roles:
        others = left - role.states.left(role.offload)
        for peak in role.peaks:
            parts = {**peak.parts(), "others": others, "libraries": libraries}
            best = max(best, DeviceUse(owner, **parts), key=lambda use: use.total)
    return best


def _use(states: States, work: PhasePeak, step: int = 0) -> DeviceUse:
    return DeviceUse("", states.weights, states.gradients, states.optimizer, 0, work.layers, work.head, step)


def _stage(allocation: Allocation, role: str, worker: int) -> int | None:
    """Return the pipeline stage of ``role`` on a worker; None if the role is not there. Ranks are pipeline-major."""
    placement = allocation.placement(role)
    rank, layout = worker - placement.first, placement.layout
    return rank // (layout.data * layout.tensor) if 0 <= rank < layout.world_size else None


def _rank_libraries(allocation: Allocation, worker: int) -> int:
    return LIBRARIES + COMMUNICATOR * _communicators(allocation, worker)


def _communicators(allocation: Allocation, worker: int) -> int:
    """Return how many communicators a rank has. Roles with one placement share theirs."""
    placements = {made for role, made in allocation.roles.items() if _stage(allocation, role, worker) is not None}
    # The world has a communicator of its own, unless it is the same as that of all ranks of a role.
    count = int(all(placement.layout.world_size < allocation.workers for placement in placements))
    for layout in (placement.layout for placement in placements):
        sizes = (layout.data, layout.pipeline, layout.tensor)
        # From three stages on, the first and the last have one for their tied weights.
        count += _COMMUNICATORS[sum(size > 1 for size in sizes)] + (layout.pipeline > 2)
    return count


def step_settings(config: Config, role: RoleSettings, data: int, *, on_gpu: bool) -> StepSettings:
    """Return the settings of a role's calls over ``data`` data ranks. A rank has its share of the batch at most."""
    train, share = config.train, -(-batch_tokens(config) // data)
    return StepSettings(
        dtype=config.model.dtype,
        tokens=min(train.microbatch_tokens, share),
        inference_tokens=min(train.inference_microbatch_tokens or train.microbatch_tokens, share),
        recompute=train.recompute,
        sequence_parallel=train.sequence_parallel,
        head_chunk=train.head_chunk_tokens,
        on_gpu=on_gpu,
        entropy_gradient=train.ppo.entropy_coef > 0,
        head_is_trained=not role.lora.rank,
        top_k=train.ppo.top_k,
    )


# ---- servers


def _server_libraries(allocation: Allocation) -> int:
    return LIBRARIES + COMMUNICATOR * (allocation.inference.tensor > 1)


def left_by_ranks(allocation: Allocation) -> int:
    """Return the most that ranks leave on a GPU while a server uses it, in bytes."""
    return max((_rank_libraries(allocation, worker) for worker in allocation.lending), default=0)


def server_use(config: Config, allocation: Allocation, *, on_gpu: bool) -> DeviceUse:
    """Return the use of each device of a server, of those that use devices in turn if there are any. Raises ModelError.

    The embedded engine allocates its whole cache at start: max_running + cache_rows + 1 rows of the longest sequence,
    2 layers kv_heads head_dim w bytes per position. For ``realsys serve`` there is an engine for each adapter, too.
    Any other engine is counted with the cache of one sequence, its
    least, on the GPU that has most of the model.
    """
    model, last = model_of(config), allocation.inference.data - 1
    first = last + 1 - allocation.lent if allocation.lent else 0
    owner = f"generation_server/{first}" + (f"-{last}" if last > first else "")
    owner += " while ranks wait" if allocation.lent else ""
    libraries, waiting = (_server_libraries(allocation), left_by_ranks(allocation)) if on_gpu else (0, 0)
    position, weights = cache_bytes(config, model), model.parameters * BYTES[config.model.dtype]
    longest = longest_sequence(config)
    if config.generation.backend != "embedded":
        sizes = sizes_of(config, allocation)
        layout = ParallelLayout(1, sizes.pipeline, sizes.tensor)
        shards = [shard_of(model, layout, stage) for stage in range(sizes.pipeline)]
        fullest = max(shards, key=lambda shard: shard.parameters)
        weights = fullest.parameters * BYTES[config.model.dtype]
        cache = longest * position * fullest.layers // (model.layers * sizes.tensor)
        return DeviceUse(owner, weights, cache=cache, libraries=libraries, waiting=waiting)
    embedded = config.generation.embedded
    engines = 1 + MOST_ADAPTERS if config.is_service else 1
    weights += _head_copy(config, model, on_gpu)
    sampling = _SAMPLED * FP32 * embedded.max_running * model.vocab
    rows = embedded.max_running + embedded.cache_rows + 1
    cache = rows * row_bytes(config, model) + embedded.max_running * _context(config) * _STORED_TOKEN
    weights, sampling, cache = engines * weights, engines * sampling, engines * cache
    return DeviceUse(owner, weights, head=sampling, cache=cache, libraries=libraries, waiting=waiting)


def row_bytes(config: Config, model: HfModel) -> int:
    """Return the bytes of one row of the embedded engine's cache: room for the longest sequence. Raises ConfigError."""
    return _context(config) * cache_bytes(config, model)


def cache_bytes(config: Config, model: HfModel) -> int:
    """Return the bytes of keys and values of one position, over all layers."""
    return 2 * model.layers * model.kv_heads * model.head_dim * BYTES[config.model.dtype]


def _context(config: Config) -> int:
    return config.generation.embedded.context_length or longest_sequence(config)


def _head_copy(config: Config, model: HfModel, on_gpu: bool) -> int:
    """Return the bytes by which the embedded engine's head exceeds the checkpoint's (``forward.weights.fuse``).

    In float32 a tied head is a copy of the embedding, with the gain of the last norm. With weights in bf16, a
    head in fp32 takes twice the bytes; if it was tied, it is a further tensor, and so is any head that a CPU packs.
    """
    entries, weight = model.vocab * model.hidden, BYTES[config.model.dtype]
    head = FP32 if config.model.head_dtype == "float32" else weight
    is_shared = on_gpu and model.tied and head == weight and weight < FP32
    return 0 if is_shared else entries * (head - (0 if model.tied else weight))


# ---- hosts
# Not counted: the page cache, and the arrays of samples (about 28 bytes per token that is buffered; with a teacher's
# top k 8 k more).


@dataclass(frozen=True, slots=True)
class HostUse:
    """Predicted bytes of host memory.

    processes   before they load a model, and the engine's own need
    snapshot    weights of an earlier version, to compare log-probs (train.engine_check)
    offload     what roles move to the host between their calls
    checkpoint  copy of the saved roles until it is on disk
    published   the rank's share of a version that it writes, and with weights.transport=memory those that it keeps
    staged      the copy of the weights that the servers share, with LoRA also of those under the adapters, and what
                each server makes of it
    ranks       models of the training ranks, if these have no GPU
    servers     models and caches of the servers, if these have no GPU
    """

    processes: int = 0
    snapshot: int = 0
    offload: int = 0
    checkpoint: int = 0
    published: int = 0
    staged: int = 0
    ranks: int = 0
    servers: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class OnHost:
    """Processes of one host, and which of them have GPUs. ``engine``: bytes of a server's engine before it loads."""

    ranks: int
    servers: int
    others: int
    engine: int = 0
    ranks_on_gpu: bool = False
    servers_on_gpu: bool = False

    @property
    def processes(self) -> int:
        """Bytes that the processes take before they load a model."""
        rank, server = (_CUDA_PROCESS if gpu else _TORCH_PROCESS for gpu in (self.ranks_on_gpu, self.servers_on_gpu))
        return self.ranks * rank + self.servers * (server + self.engine) + self.others * _LIGHT_PROCESS


def host_use(config: Config, allocation: Allocation, flow: Dataflow, here: OnHost) -> HostUse:
    """Return the use of a host that has ``here`` of the trial's processes. Raises ModelError.

    A share of the ranks counts as that share of the trainer. All servers of a host share one copy of a version.
    """
    model = model_of(config)
    weights = model.parameters * BYTES[config.model.dtype]
    trainer, pinned = here.ranks / allocation.workers, _PINNED if here.ranks_on_gpu else 1.0
    fused = backend_rules(config).fused_copies * (weights + FP32 * model.vocab * model.hidden)
    kept = config.weights.keep_versions + 1 if config.weights.transport in ("memory", "group") else 0
    # Engines that receive by group keep a copy each, to which they return if a version does not arrive.
    own_copies = config.weights.transport == "group" and config.generation.backend != "embedded"
    copies = here.servers if own_copies else min(1, here.servers)
    # SharedCopies keeps the weights under adapters, and such a version is merged in the copy that the servers share.
    under = min(1, here.servers) * (1 + own_copies) if config.train.lora.rank else 0
    ranks = servers = 0
    if not here.ranks_on_gpu:
        ranks = sum(use.total * count for use, count in rank_uses(config, allocation, flow, on_gpu=False))
        ranks = int(ranks * trainer)
    if not here.servers_on_gpu:
        servers = server_use(config, allocation, on_gpu=False).total * sizes_of(config, allocation).gpus * here.servers
    # On the host, too, those that have the devices in turn have its memory in turn.
    asleep = servers * allocation.lent // max(1, allocation.inference.data)
    if asleep < ranks:
        servers -= asleep
    elif asleep:
        ranks = 0
    return HostUse(
        processes=here.processes,
        snapshot=int(_snapshot_bytes(config, allocation) * min(1.0, trainer * allocation.actor.data) * pinned),
        offload=int(_offloaded_bytes(config, allocation, flow) * trainer) if here.ranks_on_gpu else 0,
        checkpoint=int(_checkpoint_bytes(config, flow) * trainer * pinned),
        published=int(weights * (pinned + (config.weights.delta == "auto") + kept) * trainer),
        staged=(copies + under) * weights + here.servers * fused,
        ranks=ranks,
        servers=servers,
    )


def _snapshot_bytes(config: Config, allocation: Allocation) -> int:
    """Return a copy of data rank 0's trained parameters. For a while the snapshot changes places with the weights."""
    if not config.train.engine_check:
        return 0
    settings, layout, model = role_settings(config, ACTOR), allocation.actor, model_of(config)
    how = StateSettings(config.model.dtype, True, False, False)
    shards = [shard_of(model, layout, stage) for stage in range(layout.pipeline)]
    gradients = sum(states_of(model, shard, layout, settings, how).gradients for shard in shards)
    return layout.tensor * gradients // FP32 * BYTES[config.model.dtype]


def _offloaded_bytes(config: Config, allocation: Allocation, flow: Dataflow) -> int:
    """Return what the roles of all ranks move to host memory. On a CPU it goes to files."""
    total = 0
    for role in dict.fromkeys([ACTOR, *flow.roles]):
        settings, layout = role_settings(config, role), allocation.placement(role).layout
        how = StateSettings(config.model.dtype, role in flow.trained_roles, config.train.distributed_optimizer, True)
        for stage in range(layout.pipeline if settings.offload != "none" else 0):
            model = model_of(config, role)
            states = states_of(model, shard_of(model, layout, stage), layout, settings, how)
            total += layout.data * layout.tensor * states.moved(settings.offload)
    return int(total * _PINNED)


def _checkpoint_bytes(config: Config, flow: Dataflow) -> int:
    """Return the copy of all saved roles. In any layout one rank copies each part of a parameter and its optimizer.

    A trained parameter is copied as its fp32 master with its moments, a frozen one as it is.
    """
    settings = config.checkpoint
    if not (settings.every_steps or settings.at_end or settings.on_stop):
        return 0
    total, weight, whole = 0, BYTES[config.model.dtype], ParallelLayout()
    for name in saved_roles(config, flow):
        role, model = role_settings(config, name), model_of(config, name)
        shard, trained = shard_of(model, whole, 0), name in flow.trained_roles
        states = states_of(model, shard, whole, role, StateSettings(config.model.dtype, trained, False, False))
        masters = states.gradients if weight == FP32 else 0  # bf16 counts them with the optimizer
        frozen = shard.parameters * weight if role.lora.rank or not trained else 0
        total += states.optimizer + masters + frozen
    return total

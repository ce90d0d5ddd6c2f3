"""Predicted bytes of host memory, for the processes of one host.

Not counted: the page cache, and the arrays of samples (about 28 bytes per token that is buffered).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from realsys.config.allocation import ACTOR, Allocation, ParallelLayout
from realsys.config.dataflow import Dataflow, saved_roles
from realsys.config.memory.device_memory import rank_uses, server_use
from realsys.config.memory.models import model_of
from realsys.config.memory.shard import BYTES, FP32, StateSettings, shard_of, states_of
from realsys.config.roles import role_settings
from realsys.config.rules.backend_rules import backend_rules, sizes_of
from realsys.config.schema import Config

_TORCH_PROCESS = 600 << 20  # resident memory of a process that has imported torch and Megatron
_CUDA_PROCESS = 3 << 30  # the same with a CUDA context, which maps its libraries into host memory
_LIGHT_PROCESS = 120 << 20
#: pinned buffers are rounded up to powers of two: 1 / ln 2 on average
_PINNED = 1.44


@dataclass(frozen=True, slots=True)
class HostUse:
    """Predicted bytes of host memory.

    processes   before they load a model, and the engine's own need
    snapshot    weights of an earlier version, to compare log-probs (agreement.sample_tokens)
    offload     what roles move to the host between their calls
    checkpoint  copy of the saved roles until it is on disk
    published   the rank's share of a version that it writes
    staged      the copy of the weights that the servers share, and what each makes of it
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
    ranks = servers = 0
    if not here.ranks_on_gpu:
        ranks = sum(use.total * count for use, count in rank_uses(config, allocation, flow, on_gpu=False))
    if not here.servers_on_gpu:
        servers = server_use(config, allocation, on_gpu=False).total * sizes_of(config, allocation).gpus
    return HostUse(
        processes=here.processes,
        snapshot=int(_snapshot_bytes(config, allocation) * min(1.0, trainer * allocation.actor.data) * pinned),
        offload=int(_offloaded_bytes(config, allocation, flow, on_gpu=here.ranks_on_gpu) * trainer),
        checkpoint=int(_checkpoint_bytes(config, flow) * trainer),
        published=int(weights * (pinned + (config.weights.delta == "auto")) * trainer),
        staged=min(1, here.servers) * weights + here.servers * fused,
        ranks=int(ranks * trainer),
        servers=here.servers * servers,
    )


def _snapshot_bytes(config: Config, allocation: Allocation) -> int:
    """Return a copy of data rank 0's trained parameters. For a while the snapshot changes places with the weights."""
    if not config.agreement.sample_tokens:
        return 0
    settings, layout, model = role_settings(config, ACTOR), allocation.actor, model_of(config)
    how = StateSettings(config.model.dtype, True, False, False)
    shards = [shard_of(model, layout, stage) for stage in range(layout.pipeline)]
    gradients = sum(states_of(model, shard, layout, settings, how).gradients for shard in shards)
    return layout.tensor * gradients // FP32 * BYTES[config.model.dtype]


def _offloaded_bytes(config: Config, allocation: Allocation, flow: Dataflow, *, on_gpu: bool) -> int:
    """Return what the roles of all ranks move to the host between their calls. On a CPU it stays host memory."""
    total = 0
    for role in dict.fromkeys([ACTOR, *flow.roles]):
        settings, layout = role_settings(config, role), allocation.placement(role).layout
        how = StateSettings(config.model.dtype, role in flow.trained_roles, config.train.distributed_optimizer, on_gpu)
        for stage in range(layout.pipeline if settings.offload != "none" else 0):
            model = model_of(config, role)
            states = states_of(model, shard_of(model, layout, stage), layout, settings, how)
            total += layout.data * layout.tensor * states.moved(settings.offload)
    return int(total * _PINNED) if on_gpu else total


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

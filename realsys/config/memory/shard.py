"""Parameters of one training rank, and the bytes that belong to them between micro-batches.

Sources: ``realsys.train.megatron.heads.build_model`` (what a rank has), Megatron-Core's
``DistributedDataParallel`` (gradient buffer), ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` and
``DistributedOptimizer`` (master weights), torch's ``AdamW`` and ``SGD`` (moments, temporaries).
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.config.allocation import ParallelLayout
from realsys.config.roles import RoleSettings
from realsys.config.sections.schema_train import LoraConfig
from realsys.hf.architecture import HfModel, stage_layers

FP32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS = {"adam": 2, "sgd": 1}  # fp32 numbers per parameter


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a model that one rank has. Sizes are numbers of parameters, unless said otherwise.

    layers     number of decoder layers, each with ``layer`` parameters
    embedding  0 after the first stage
    head       0 before the last stage, and if the embedding serves as the head
    norm       0 before the last stage
    vocab      rows of the vocabulary on this rank, padding included
    largest    the largest tensor
    """

    layers: int
    layer: int
    embedding: int
    head: int
    norm: int
    vocab: int
    largest: int
    last: bool

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embedding + self.head + self.norm


def shard_of(model: HfModel, layout: ParallelLayout, stage: int) -> Shard:
    """Return what a rank of pipeline stage ``stage`` has.

    The linear layers and the vocabulary are split over the tensor ranks; norms, and the norms of query and key, are
    whole on each. A vocabulary that does not divide is padded. The last stages may have a layer less.
    """
    tensor, hidden = layout.tensor, model.hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    vocab = model.vocab_shard(tensor)
    matrices = sum(rows * columns for rows, columns in linear_shapes(model, tensor).values())
    bias = qkv_rows(model) // tensor if model.qkv_bias else 0
    layer = matrices + bias + 2 * hidden + (2 * model.head_dim if model.qk_norm else 0)
    if not last:
        head = 0
    elif model.head == "value":
        head = hidden
    else:
        head = 0 if model.tied and first else vocab * hidden  # A tied head is a copy if there are several stages.
    return Shard(
        layers=stage_layers(model.layers, layout.pipeline)[stage],
        layer=layer,
        embedding=vocab * hidden if first else 0,
        head=head,
        norm=hidden if last else 0,
        vocab=vocab,
        largest=vocab * hidden if first or last else max(r * c for r, c in linear_shapes(model, tensor).values()),
        last=last,
    )


def qkv_rows(model: HfModel) -> int:
    """Return the rows of query, key and value together."""
    return (model.heads + 2 * model.kv_heads) * model.head_dim


def linear_shapes(model: HfModel, tensor: int) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of a layer's fused matrices on one tensor rank, by the names of ``LoraConfig.targets``."""
    hidden, ffn = model.hidden, model.ffn // tensor
    return {
        "qkv": (qkv_rows(model) // tensor, hidden),
        "proj": (hidden, model.heads * model.head_dim // tensor),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one role on one rank between two micro-batches.

    optimizer   fp32 master weights and moments
    temporary   of the optimizer's step: nothing else is computed during it
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """All but the temporaries."""
        return self.weights + self.gradients + self.optimizer

    def left(self, offload: str) -> int:
        """Return what stays on the device between the role's calls."""
        return {"none": self.total, "optimizer": self.weights, "all": 0}[offload]

    def moved(self, offload: str) -> int:
        """Return what goes to the host between the role's calls: gradients are dropped, not moved."""
        return {"none": 0, "optimizer": self.optimizer, "all": self.optimizer + self.weights}[offload]


def states_of(
    model: HfModel, shard: Shard, layout: ParallelLayout, settings: RoleSettings, how: StateSettings
) -> States:
    """Return the states of a role on one rank. N parameters, w bytes each, d data ranks:

    frozen          w N
    trained         w N + 4 N (gradients) + 4 N (master weights, if w = 2) + 8 N (moments of Adam; SGD 4 N)
    distributed     w N + 4 N + (master weights and moments) / d
    LoRA            w (N + bases + A) + the rest of ``trained`` for the A parameters of the adapters only

    The step of AdamW is ``fused``: one kernel reads and writes the states, and holds nothing else. SGD adds the weight
    decay to a copy of the gradients: on a GPU of all that it steps (``foreach``), on a CPU of one after the other.
    """
    count, weight = shard.parameters, BYTES[how.dtype]
    if not how.trained:
        return States(count * weight)
    trained, frozen = count, 0
    if settings.lora.rank:
        trained, bases = _adapters(model, shard, layout.tensor, settings.lora)
        frozen = count + bases
    per_parameter = FP32 * _MOMENTS[settings.optimizer.name] + (FP32 if weight < FP32 else 0)
    stepped = trained // (layout.data if how.distributed_optimizer else 1)
    largest = shard.largest if not settings.lora.rank else 0
    return States(
        weights=(frozen + trained) * weight,
        gradients=trained * FP32,
        optimizer=stepped * per_parameter,
        temporary=_step_temporary(settings, stepped if how.on_gpu else min(stepped, largest)),
    )


def _step_temporary(settings: RoleSettings, decayed: int) -> int:
    """Return the bytes that the step of the optimizer holds. ``decayed``: parameters that it decays at a time."""
    return FP32 * decayed if settings.optimizer.name == "sgd" and settings.optimizer.weight_decay else 0


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings that the states depend on, besides those of the role."""

    dtype: str
    trained: bool
    distributed_optimizer: bool
    on_gpu: bool


def _adapters(model: HfModel, shard: Shard, tensor: int, lora: LoraConfig) -> tuple[int, int]:
    """Return the parameters of a rank's adapters, and of the frozen copies under them (``megatron.lora.Adapter``)."""
    shapes = linear_shapes(model, tensor)
    targets = [shapes[name] for name in lora.targets]
    adapters = sum(lora.rank * (rows + columns) for rows, columns in targets)
    return shard.layers * adapters, shard.layers * sum(rows * columns for rows, columns in targets)

"""Bytes of one training rank: its parameters and their states, and the micro-batches that it computes.

No torch: every number is computed from the sizes. docs/allocation.md has the formulas in one table.

Sources: ``realsys.train.megatron.heads.build_model`` (what a rank has), ``realsys.train.megatron.layers`` (own parts of
the layer); of Megatron-Core ``DistributedDataParallel`` (gradient buffer), ``Float16OptimizerWithFloat16Params``,
``FP32Optimizer`` and ``DistributedOptimizer`` (master weights), ``TransformerLayer``, the linear layers and the 1F1B
schedule (micro-batches in flight); of torch ``AdamW`` and ``SGD`` (moments, temporaries) and ``checkpoint``
(recompute).
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.config.allocation import ParallelLayout
from realsys.config.dataflow import RoleSettings
from realsys.config.schema_train import LoraConfig
from realsys.model_files.architecture import HfModel, stage_layers

FP32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS = {"adam": 2, "sgd": 1}  # fp32 numbers per parameter
_INDEX = 8  # bytes of a token id, and of an index
_TARGET = 2 * _INDEX + 5 * FP32  # bytes of a log-prob that the head computes, besides that of the loss token


# ---- parameters of a rank


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


# ---- states: bytes that belong to the parameters between two micro-batches


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


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Settings that the states depend on, besides those of the role."""

    dtype: str
    trained: bool
    distributed_optimizer: bool
    on_gpu: bool


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


def _adapters(model: HfModel, shard: Shard, tensor: int, lora: LoraConfig) -> tuple[int, int]:
    """Return the parameters of a rank's adapters, and of the frozen copies under them (``megatron.lora.Adapter``)."""
    shapes = linear_shapes(model, tensor)
    targets = [shapes[name] for name in lora.targets]
    adapters = sum(lora.rank * (rows + columns) for rows, columns in targets)
    return shard.layers * adapters, shard.layers * sum(rows * columns for rows, columns in targets)


def _step_temporary(settings: RoleSettings, decayed: int) -> int:
    """Return the bytes that the step of the optimizer holds. ``decayed``: parameters that it decays at a time."""
    return FP32 * decayed if settings.optimizer.name == "sgd" and settings.optimizer.weight_decay else 0


# ---- activations: bytes of a micro-batch
#
# Everything is per token, so the number of tokens decides, not how they are cut into sequences.
#
# w: bytes per parameter, m: tensor ranks, h: hidden, f: feed-forward, q and k: width of all query and of all key
# heads, s: m with sequence parallelism, else 1.


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one role's calls that their memory depends on.

    tokens            of a micro-batch with gradients, on one rank
    inference_tokens  of a micro-batch without
    recompute         ``train.recompute``
    head_chunk        loss tokens whose logits exist at the same time; 0: all
    on_gpu            True for the attention kernel and the norm of CUDA, False for the CPU's
    head_is_trained   False under LoRA
    top_k             tokens of a teacher that the loss reads at each loss token
    """

    dtype: str
    tokens: int
    inference_tokens: int
    recompute: bool | int | str
    sequence_parallel: bool
    head_chunk: int
    on_gpu: bool
    entropy_gradient: bool = False
    head_is_trained: bool = True
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Bytes at the peak of one phase, besides the states: ``layers`` and ``head`` at the same moment."""

    layers: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.head


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes per token of one layer on one rank.

    kept      for its backward pass
    input     its input, which is all that a recomputed layer keeps
    backward  what the backward pass holds beyond ``kept`` at its peak, in the activation of the feed-forward part
    forward   what the forward pass holds at its peak without gradients
    """

    kept: float
    input: float
    backward: float
    forward: float


def recomputed_layers(setting: bool | int | str, layers: int) -> int:
    """Return how many of a stage's ``layers`` are recomputed: its first ones. Until ``auto`` is chosen, it is all."""
    return layers if setting is True or setting == "auto" else min(int(setting), layers)


def recomputed_of_model(setting: bool | int | str, layers: int, stages: int) -> int:
    """Return how many layers of a model are recomputed, over all its pipeline stages."""
    return sum(recomputed_layers(setting, each) for each in stage_layers(layers, stages))


def training_work(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings, stage: int) -> PhasePeak:
    """Return the peak of forward and backward pass of the micro-batches that are in flight on a stage.

    Stage i of p has p - i micro-batches in flight (1F1B). The last stage has one, and the head, whose peak meets the
    activations of all layers. Recomputed layers have only their input until their backward pass, which is that of the
    first layers of the stage: the activations of the others are free by then.
    """
    each = layer_bytes(model, layout, how)
    in_flight = layout.pipeline - stage
    again = recomputed_layers(how.recompute, shard.layers)
    kept = again * each.input + (shard.layers - again) * each.kept
    angles = 2 * FP32 * model.head_dim / 2 + 3 * _INDEX
    sent = each.input if layout.pipeline > 1 else 0.0  # the schedule keeps what it sent
    stored = in_flight * (kept + angles + sent)
    linear = max(rows * columns for rows, columns in linear_shapes(model, layout.tensor).values())
    weight_gradient = BYTES[how.dtype] * linear if how.head_is_trained else 0
    backward = (each.kept if again == shard.layers else 0.0) + each.backward
    gathered = _gathered(model, layout, how)
    layers = PhasePeak(int(how.tokens * (stored + backward + gathered) + weight_gradient))
    if not shard.last:
        return layers
    head = PhasePeak(int(how.tokens * (stored + gathered)), head_bytes(model, shard, layout, how))
    return max(layers, head, key=lambda work: work.total)


def inference_work(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings) -> PhasePeak:
    """Return the peak of a forward pass without gradients: that of one layer, or that of the head."""
    each, tokens = layer_bytes(model, layout, how), how.inference_tokens
    gathered = _gathered(model, layout, how)
    layers = PhasePeak(int(tokens * (each.forward + gathered)))
    if not shard.last:
        return layers
    states = 2 * BYTES[how.dtype] * model.hidden + _TARGET * how.top_k
    scored = min(tokens, how.head_chunk or tokens)
    logit = FP32 if how.on_gpu else 2 * FP32  # on a CPU there are exponentials, too
    logits = logit * scored * shard.vocab if model.head == "lm" else FP32 * model.hidden * tokens
    return max(layers, PhasePeak(int(tokens * gathered), int(tokens * states + logits)), key=lambda work: work.total)


def layer_bytes(model: HfModel, layout: ParallelLayout, how: StepSettings) -> LayerBytes:
    """Return the bytes per token of a layer.

    On a GPU a layer keeps: the input of each of its two norms and its root mean square (2 (w h + 4) / s), the output
    of each, which is the input of the next linear layer (2 w h / s), query, key and value as the linear layer made
    them, of which the value is read again (w (q + 2 k) / m), rotated query and key (w (q + k) / m), the output of
    attention (w q / m) and its normaliser (4 heads / m), gate and up (2 w f / m), and the product of the two (w f / m).
    On a CPU the norm keeps its result in fp32 instead of its input, and attention also a second copy of its output.

    The peak of the backward pass is in the activation: the gradients of gate, up and product and three temporaries,
    while the product itself is free already: 5 w f / m. Without gradients five tensors of the residual stream live
    together with gate, up and product, or with attention and its rotation in fp32; with sequence parallelism also the
    whole output of a linear layer, before it is reduced and scattered.
    """
    weight, tensor = BYTES[how.dtype], layout.tensor
    split = tensor if how.sequence_parallel else 1
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    ffn = weight * model.ffn / tensor
    residual = weight * model.hidden / split
    # With more ranks than key-value heads, a rank gathers the whole and takes its part of it as a view.
    is_gathered = tensor > model.kv_heads
    fused = weight * (query + 2 * key) / (1 if is_gathered else tensor)
    rotated = weight * (query / tensor + (model.head_dim if is_gathered else key / tensor))
    attended = weight * query / tensor
    normed = (residual if how.on_gpu else FP32 * model.hidden / split) + FP32 / split
    attention = fused + rotated + attended * (1 if how.on_gpu else 2) + FP32 * model.heads / tensor
    rotation = fused + (weight + 2 * FP32) * query / tensor
    if model.qk_norm:
        attention += _query_key_norms(model, tensor, how)
    return LayerBytes(
        kept=2 * normed + 2 * residual + attention + 3 * ffn,
        input=residual,
        backward=residual + 5 * ffn,
        forward=5 * residual + max(3 * ffn, attention, rotation) + _gathered(model, layout, how),
    )


def _query_key_norms(model: HfModel, tensor: int, how: StepSettings) -> float:
    """Return the bytes per token of the norms of query and key: input of the query's, or on a CPU both results."""
    weight, rows = BYTES[how.dtype], (model.heads + model.kv_heads) / tensor
    if how.on_gpu:
        return weight * model.heads * model.head_dim / tensor + FP32 * rows
    return FP32 * rows * (model.head_dim + 1)


def head_bytes(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings) -> int:
    """Return the peak of the head with gradients, if every token is a loss token.

    Final norm and selection of rows keep the states: input and output (2 w h / s per token), selected rows, and the
    gradient of these (2 w h). The backward pass makes the logits of a chunk in fp32 and their gradient ((4 + w) V / m
    per token of the chunk), and adds the weight's gradient to Megatron's buffer. For its hook there is an unused one in
    the end, unless the weight is also the embedding.

    For the k tokens of a teacher there are about seven numbers each (``_TARGET``), and the gradient of the logits is in
    fp32 until they are added.

    On a CPU there are besides: in the forward pass exponentials in fp32, in the backward pass those of an entropy bonus
    and a mark per logit; and if the model is not in fp32, logits as they were, and the weight's gradient of a chunk.
    """
    weight, tokens = BYTES[how.dtype], how.tokens
    if model.head == "value":
        return 3 * FP32 * model.hidden * tokens
    split = layout.tensor if how.sequence_parallel else 1
    states = ((2 + 2 / split) * weight * model.hidden + _TARGET * how.top_k) * tokens
    logits = min(tokens, how.head_chunk or tokens) * shard.vocab
    entries = shard.vocab * model.hidden if how.head_is_trained else 0
    unused = weight * entries if shard.head else 0
    if how.on_gpu:
        return int(states + max((FP32 + (FP32 if how.top_k else weight)) * logits, unused))
    rounded = weight if weight < FP32 else 0
    forward, backward = 2 * FP32 + rounded, FP32 * (1 + how.entropy_gradient) + 1 + 2 * rounded
    backward += rounded if how.top_k else 0
    product = 2 * rounded * logits + (weight * entries if rounded else 0)
    return int(states + max(max(forward, backward) * logits, product, unused))


def _gathered(model: HfModel, layout: ParallelLayout, how: StepSettings) -> float:
    """Return the bytes per token of Megatron's buffer for the gathered input of a linear layer."""
    return BYTES[how.dtype] * model.hidden if how.sequence_parallel and layout.tensor > 1 else 0.0

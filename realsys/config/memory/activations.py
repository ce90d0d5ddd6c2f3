"""Bytes of a micro-batch on one training rank: what layers and head keep for the backward pass, and their peaks.

Everything is per token, so the number of tokens decides, not how they are cut into sequences. Sources:
``realsys.train.megatron.layers`` (own parts of the layer), Megatron-Core's ``TransformerLayer`` and linear
layers, ``realsys.train.megatron.heads`` (head), ``torch.utils.checkpoint`` as Megatron uses it (recompute), and
Megatron's 1F1B schedule (micro-batches in flight).

w: bytes per parameter, m: tensor ranks, h: hidden, f: feed-forward, q and k: width of all query and of all key heads,
s: m with sequence parallelism, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.config.allocation import ParallelLayout
from realsys.config.memory.shard import BYTES, FP32, Shard, linear_shapes
from realsys.hf.architecture import HfModel

_INDEX = 8  # bytes of a token id, and of an index


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one role's calls that their memory depends on.

    tokens            of a micro-batch with gradients, on one rank
    inference_tokens  of a micro-batch without
    head_chunk        loss tokens whose logits exist at the same time; 0: all
    on_gpu            True for the attention kernel and the norm of CUDA, False for the CPU's
    head_is_trained   False under LoRA
    """

    dtype: str
    tokens: int
    inference_tokens: int
    recompute: bool
    sequence_parallel: bool
    head_chunk: int
    on_gpu: bool
    entropy_gradient: bool = False
    head_is_trained: bool = True


@dataclass(frozen=True, slots=True)
class Work:
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
    input     its input, which is all that recompute keeps
    backward  what the backward pass holds beyond ``kept`` at its peak, in the activation of the feed-forward part
    forward   what the forward pass holds at its peak without gradients
    """

    kept: float
    input: float
    backward: float
    forward: float


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


def training_work(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings, stage: int) -> Work:
    """Return the peak of forward and backward pass of the micro-batches that are in flight on a stage.

    Stage i of p has p - i micro-batches in flight (1F1B). The last stage has one, and the head, whose peak meets the
    activations of all layers; without recompute these are larger than with it.
    """
    each = layer_bytes(model, layout, how)
    in_flight = layout.pipeline - stage
    kept = each.input if how.recompute else each.kept
    angles = 2 * FP32 * model.head_dim / 2 + 3 * _INDEX
    sent = each.input if layout.pipeline > 1 else 0.0  # the schedule keeps what it sent
    stored = in_flight * (shard.layers * kept + angles + sent)
    linear = max(rows * columns for rows, columns in linear_shapes(model, layout.tensor).values())
    weight_gradient = BYTES[how.dtype] * linear if how.head_is_trained else 0
    backward = (each.kept if how.recompute else 0.0) + each.backward
    gathered = _gathered(model, layout, how)
    layers = Work(int(how.tokens * (stored + backward + gathered) + weight_gradient))
    if not shard.last:
        return layers
    # The gradient of a tied weight waits for its second part until the backward pass has reached the embedding.
    is_tied = model.head == "lm" and not shard.head and how.head_is_trained
    waiting = BYTES[how.dtype] * shard.embedding if is_tied else 0
    layers = Work(layers.layers, waiting)
    head = Work(int(how.tokens * (stored + gathered)), head_bytes(model, shard, layout, how))
    return max(layers, head, key=lambda work: work.total)


def inference_work(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings) -> Work:
    """Return the peak of a forward pass without gradients: that of one layer, or that of the head."""
    each, tokens = layer_bytes(model, layout, how), how.inference_tokens
    gathered = _gathered(model, layout, how)
    layers = Work(int(tokens * (each.forward + gathered)))
    if not shard.last:
        return layers
    states = 2 * BYTES[how.dtype] * model.hidden
    scored = min(tokens, how.head_chunk or tokens)
    logits = 2 * FP32 * scored * shard.vocab if model.head == "lm" else FP32 * model.hidden * tokens
    return max(layers, Work(int(tokens * gathered), int(tokens * states + logits)), key=lambda work: work.total)


def _gathered(model: HfModel, layout: ParallelLayout, how: StepSettings) -> float:
    """Return the bytes per token of Megatron's buffer for the gathered input of a linear layer."""
    return BYTES[how.dtype] * model.hidden if how.sequence_parallel and layout.tensor > 1 else 0.0


def head_bytes(model: HfModel, shard: Shard, layout: ParallelLayout, how: StepSettings) -> int:
    """Return the peak of the head with gradients, if every token is a loss token.

    Final norm and selection of rows keep the states: input, output and selected rows, and the gradient of these
    (4 w h per token). The forward pass holds logits and their exponentials in fp32 (8 V / m per token of a chunk),
    the backward pass logits and their gradient (4 + w) V / m, and the gradient of the weight: with several chunks
    the old sum in w bytes, the new one in fp32, and the share of the chunk, else the share alone. Without chunks the
    softmax stays from the forward pass to the backward pass.
    """
    weight, tokens = BYTES[how.dtype], how.tokens
    if model.head == "value":
        return 3 * FP32 * model.hidden * tokens
    states = 4 * weight * model.hidden * tokens
    chunk = min(tokens, how.head_chunk or tokens)
    logits = chunk * shard.vocab
    entries = shard.vocab * model.hidden if how.head_is_trained else 0
    is_whole = chunk == tokens
    gradient = weight * entries if is_whole else (2 * weight + (FP32 if weight < FP32 else 0)) * entries
    backward = (FP32 + (FP32 if how.entropy_gradient else weight)) * logits + gradient
    return int(states + max(2 * FP32 * logits, backward))

"""Megatron-Core around one model role on one rank: build, forward, forward and backward, optimizer step, export.

    load(HF directory) -> logprobs(micro-batches)                       actor_inf
                       -> accumulate(micro-batches, loss) -> step(lr)   actor_train, sft
                       -> export() -> HF tensors                        save_weights

Every rank of the mesh makes the same calls in the same order, with the same number of micro-batches: they are
collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config, OptimizerConfig
from realsys.errors import ModelError
from realsys.train.device import Device, seed_megatron
from realsys.train.fused import select_rows
from realsys.train.hf_config import DTYPES, read_hf_config, transformer_config
from realsys.train.hf_map import ShardMap
from realsys.train.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    MegatronOptimizerConfig,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    parallel_state,
)
from realsys.train.mesh import data_parallel_group, tensor_parallel_group
from realsys.train.packing import MicroBatch
from realsys.train.spec import PackedSegments, block_spec, pack_segments
from realsys.train.vocab_logprob import vocab_logprobs

Stats = dict[str, torch.Tensor]
#: (micro-batch, log-probs [a], entropies [a]) -> this micro-batch's share of the step's loss, statistics
LossFunction = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Stats]]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``applied`` is False when the step was skipped because the gradient was not finite."""

    grad_norm: float
    applied: bool


class MegatronEngine:
    """One rank's shard of one model, its gradients and its optimizer. Needs torch.distributed and ``form_mesh``."""

    def __init__(self, config: Config, layout: ParallelLayout, device: Device) -> None:
        self._train = config.train
        self._dtype = config.model.dtype
        self._temperature = config.generation.sampling.temperature
        self._seed = config.seed
        self._layout, self._device = layout, device
        self.first_stage: bool = parallel_state.is_pipeline_first_stage()
        self.last_stage: bool = parallel_state.is_pipeline_last_stage()
        self.data_rank: int = parallel_state.get_data_parallel_rank()
        self.tensor_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self._module: Any = None  # GPTModel
        self._model: Any = None  # the same, with gradient buffers
        self._optimizer: Any = None
        self._phase: tuple[str, OptimizerConfig] | None = None

    @property
    def token_multiple(self) -> int:
        """The tokens of a micro-batch must divide by this."""
        return self._layout.tensor if self._train.sequence_parallel else 1

    @property
    def parameter_count(self) -> int:
        """Parameters on this rank."""
        return sum(parameter.numel() for parameter in self._module.parameters())

    def load(self, directory: Path) -> None:
        """Build this rank's shard and fill it. Raises ModelError when the model is unusable or does not fit."""
        model = read_hf_config(directory)
        megatron = transformer_config(model, self._layout, self._train, self._dtype)
        with self._device.active():
            seed_megatron(self._device, self._seed)
            self._module = GPTModel(
                megatron,
                block_spec(megatron, model.layers // self._layout.pipeline),
                vocab_size=model.vocab,
                max_sequence_length=1 << 20,  # only a hint: positions are ours
                pre_process=self.first_stage,
                post_process=self.last_stage,
                parallel_output=True,
                share_embeddings_and_output_weights=model.tied,
                position_embedding_type="none",  # the core attention rotates
            )
            self._map = ShardMap(model, self.tensor_rank, self._layout.tensor)
            self._map.load(self._module, directory)
            self._module.to(self._device.device)
            gradients = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=self._train.distributed_optimizer
            )
            self._model = DistributedDataParallel(megatron, gradients, self._module)
        megatron.finalize_model_grads_func = finalize_model_grads
        self._inverse_frequencies = model.rope.inverse_frequencies(model.head_dim).to(self._device.device)
        self._tied = model.tied
        self._schedule = get_forward_backward_func()

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of the answer tokens, fp32 [a] per micro-batch; [] before the last stage."""
        self._require_model()
        with self._device.active(), torch.no_grad():
            found: list[torch.Tensor] = self._run(
                batches,
                forward_only=True,
                collect_non_loss_data=True,
                forward_step_func=self._step(self._only_logprobs),
            )
        return found

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Stats]:
        """Gradient of the sum of ``loss`` over all micro-batches of all data ranks, reduced over the mesh.

        Returns the statistics per micro-batch; empty before the last stage.
        """
        self._require_model()
        # Megatron divides by the micro-batches and by the data ranks; ours are shares of one sum already.
        scale = float(len(batches) * self._layout.data)
        with self._device.active():
            self._model.zero_grad_buffer()
            forward = self._step(partial(self._scaled_loss, loss, scale))
            stats: list[Stats] = self._run(batches, forward_only=False, forward_step_func=forward)
        return stats

    def use_optimizer(self, phase: str, settings: OptimizerConfig) -> None:
        """Steps from here on belong to ``phase``; a new phase (or new settings) starts with fresh optimizer state."""
        self._require_model()
        if self._phase == (phase, settings):
            return
        self._optimizer = None  # free the old state before the new is made
        dtype = DTYPES[self._dtype]
        with self._device.active():
            self._optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=settings.lr,
                    adam_beta1=settings.beta1,
                    adam_beta2=settings.beta2,
                    adam_eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    clip_grad=settings.clip_grad,
                    bf16=dtype is torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=self._train.distributed_optimizer,
                ),
                [self._model],
                use_gloo_process_groups=False,
            )
        self._phase = (phase, settings)

    def step(self, lr: float, *, skip: bool = False) -> StepOutcome:
        """One optimizer step with the accumulated gradients; not taken when ``skip`` or when they are not finite.

        The norm is global, so all ranks decide alike.
        """
        assert self._phase is not None, "use_optimizer comes before step"
        settings = self._phase[1]
        with self._device.active():
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if skip or not math.isfinite(norm):
                return StepOutcome(norm, applied=False)
            if 0 < settings.clip_grad < norm:
                for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
                    parameters = part.get_parameters()
                    if parameters:
                        clip_grad_by_total_norm_fp32(parameters, settings.clip_grad, norm, False)
            self._optimizer.step_with_ready_grads()
        return StepOutcome(norm, applied=True)

    def export(self, *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The HF tensors that this rank writes, in the model's dtype. Run it to its end on every rank."""
        self._require_model()
        dtype = torch.float32 if gradients else DTYPES[self._dtype]
        exported = self._map.export(
            self._module,
            data_rank=self.data_rank,
            data_ranks=self._layout.data,
            group=tensor_parallel_group(),
            skip_head=self._tied and not self.first_stage,
            gradients=gradients,
        )
        for name, tensor in exported:
            yield name, tensor.to(dtype)

    def _require_model(self) -> None:
        if self._model is None:
            raise ModelError("this ModelWorker has no model yet: 'initialize' comes first")

    def _run(self, batches: Sequence[MicroBatch], **schedule: Any) -> Any:
        return self._schedule(
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=1,  # unused: lengths vary, and the stages tell each other
            micro_batch_size=1,
            **schedule,
        )

    def _step(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's forward step: the next micro-batch through this stage; ``finish`` is for the last stage."""

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches)
            tokens = None if batch.tokens is None else batch.tokens[None]
            output = model(tokens, None, None, packed_seq_params=self._segments(batch))
            return output, partial(finish, batch)

        return forward_step

    def _segments(self, batch: MicroBatch) -> PackedSegments:
        dtype = DTYPES[self._dtype]
        kernel = self._device.is_cuda and dtype is not torch.float32  # the CUDA kernel has no fp32
        return pack_segments(batch.lengths, self._inverse_frequencies, dtype, kernel=kernel)

    def _answer_logprobs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [1, t, V/tp] -> log-probs and entropies [a] at the sampling temperature."""
        assert batch.targets is not None
        selected = select_rows(logits[0], batch.rows)
        return vocab_logprobs(selected, batch.targets, temperature=self._temperature, group=tensor_parallel_group())

    def _only_logprobs(self, batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        return self._answer_logprobs(batch, logits)[0]

    def _scaled_loss(
        self, loss: LossFunction, scale: float, batch: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, Stats]:
        share, stats = loss(batch, *self._answer_logprobs(batch, logits))
        return share * scale, stats


def data_ranks_reduce(stats: dict[str, float], device: Device, *, maxima: bool) -> dict[str, float]:
    """Sum (or maximum) of each entry over the data ranks of this stage; all of them must have the same keys."""
    group = data_parallel_group()
    if group.size() == 1 or not stats:
        return stats
    keys = sorted(stats)
    values = torch.tensor([stats[key] for key in keys], dtype=torch.float64, device=device.device)
    torch.distributed.all_reduce(
        values, torch.distributed.ReduceOp.MAX if maxima else torch.distributed.ReduceOp.SUM, group=group
    )
    return dict(zip(keys, values.tolist(), strict=True))

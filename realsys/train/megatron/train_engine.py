"""Megatron-Core around one model role on one rank: build, forward, forward and backward, optimizer step, export.

    load(HF directory) -> logprobs(micro-batches)                       actor_inf, ref_inf
                       -> values, scores(micro-batches)                 critic_inf, reward_inf
                       -> accumulate(micro-batches, loss) -> step(lr)   actor_train, critic_train, sft
                       -> export() -> HF tensors                        save_weights
                       -> offload(), onload()                           between calls

Every rank of the mesh makes the same calls in the same order, with the same number of micro-batches: they are
collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from realsys.cluster.failpoint import failpoint
from realsys.config.roles import RoleSettings
from realsys.config.schema import Config
from realsys.config.schema_train import OptimizerConfig
from realsys.errors import ModelError
from realsys.hf.config import read_model
from realsys.hf.rope import inverse_frequencies
from realsys.train.megatron import lora
from realsys.train.megatron.device import Device, seed_megatron
from realsys.train.megatron.heads import HiddenStatesModel, build_model, select_states
from realsys.train.megatron.hf_config import DTYPES, transformer_config
from realsys.train.megatron.hf_map import ShardMap
from realsys.train.megatron.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
)
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.offload import OffloadedMemory, storages
from realsys.train.megatron.optimizer import StepOutcome, make_optimizer, optimizer_tensors, take_step
from realsys.train.megatron.spec import PackedSegments, pack_segments
from realsys.train.packing import MicroBatch, last_rows, loss_and_end_rows
from realsys.train.vocab_logprob import Scoring, projected_logprobs

Stats = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a loss is made of, fp32 [a] over the micro-batch's answer tokens.

    lm head     logprobs and entropy; the entropy has a gradient only if train.ppo.entropy_coef > 0
    value head  values, of the state before each token
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None


#: this micro-batch's share of the step's loss, statistics
LossFunction = Callable[[MicroBatch, Outputs], tuple[torch.Tensor, Stats]]


class MegatronEngine:
    """One rank's shard of one role's model; if ``trainable`` its gradients and its optimizer."""

    def __init__(
        self, config: Config, settings: RoleSettings, groups: MeshGroups, device: Device, *, trainable: bool = True
    ) -> None:
        self.settings, self.groups = settings, groups
        self.module: HiddenStatesModel | None = None
        self.ddp_model: Any = None  # the module with gradient buffers, if it is trained
        self.optimizer: Any = None
        #: what the optimizer's state belongs to
        self.phase: tuple[str, OptimizerConfig] | None = None
        self._train, self._seed, self._device, self._trainable = config.train, config.seed, device, trainable
        self._dtype = DTYPES[config.model.dtype]
        self._dtype_name = config.model.dtype
        self._sequence_parallel = config.train.sequence_parallel and groups.mesh.layout.tensor > 1
        self._scoring = Scoring(
            temperature=config.generation.sampling.temperature,
            chunk=config.train.head_chunk_tokens,
            entropy_gradient=config.train.ppo.entropy_coef > 0,
            group=groups.tensor,
        )
        self._offloaded: OffloadedMemory | None = None

    @property
    def first_stage(self) -> bool:
        return self.groups.first_stage

    @property
    def last_stage(self) -> bool:
        return self.groups.last_stage

    @property
    def data_rank(self) -> int:
        return self.groups.data_rank

    @property
    def tensor_rank(self) -> int:
        return self.groups.tensor_rank

    @property
    def token_multiple(self) -> int:
        """The tokens of a micro-batch must divide by this."""
        return self.groups.mesh.layout.tensor if self._sequence_parallel else 1

    @property
    def parameter_count(self) -> int:
        """Parameters on this rank."""
        return sum(parameter.numel() for parameter in self._require_model().parameters())

    def load(self, directory: Path) -> None:
        """Build this rank's shard and fill it. Raises ModelError when the model is unusable or does not fit."""
        layout = self.groups.mesh.layout
        model = read_model(directory, self.settings.head)
        megatron = transformer_config(model, layout, self._train, self._dtype_name)
        megatron.finalize_model_grads_func = finalize_model_grads
        self._tied = model.tied
        self._inverse_frequencies = inverse_frequencies(model.rope, model.head_dim).to(self._device.device)
        self._map = ShardMap(model, self.tensor_rank, layout.tensor)
        with self._active():
            seed_megatron(self._device, self._seed)
            module = build_model(model, megatron, self.groups)
            self._map.load(module, directory)
            self.module = module.to(self._device.device)
            if self._trainable:
                self.ddp_model = self._trained(module, megatron)
            else:
                module.requires_grad_(False)
            self._schedule = get_forward_backward_func()

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probs of the loss tokens, fp32 [a] per micro-batch; [] before the last stage. For an lm head."""
        self._require_head("lm")
        return self._read(batches, lambda batch, hidden: self._score(batch, hidden)[0])

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Values of the states of the loss tokens, fp32 [a + n] per micro-batch of n rows; [] before the last stage.

        Each sequence in turn: the state before each of its loss tokens, then the one after the last. For a value
        head.
        """
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._evaluate(hidden, loss_and_end_rows(batch)))

    def scores(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The value at each sequence's last token, fp32 [n] per micro-batch; [] before the last stage. Value head."""
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._evaluate(hidden, last_rows(batch)))

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Stats]:
        """Gradient of the sum of ``loss`` over all micro-batches of all data ranks, reduced over the mesh in fp32.

        Returns the statistics per micro-batch; empty before the last stage.
        """
        self._require_training()
        # Megatron divides by the micro-batches and by the data ranks; ours are shares of one sum already.
        scale = float(len(batches) * self.groups.mesh.layout.data)

        def scaled_loss(batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            share, stats = loss(batch, self._outputs(batch, hidden))
            return share * scale, stats

        with self._active():
            self.ddp_model.zero_grad_buffer()
            if self.optimizer is not None:
                # The last step left each parameter's grad as an alias of the buffer, which the backward pass would
                # then count twice.
                self.optimizer.zero_grad()
            forward = self._step(scaled_loss)
            stats: list[Stats] = self._run(self.ddp_model, batches, forward_only=False, forward_step_func=forward)
        return stats

    def use_optimizer(self, phase: str, settings: OptimizerConfig) -> None:
        """Steps from here on belong to ``phase``; a new phase (or new settings) starts with fresh optimizer state."""
        self._require_training()
        if self.phase == (phase, settings):
            return
        self.optimizer = None  # free the old state before the new is made
        with self._active():
            self.optimizer = make_optimizer(self.ddp_model, settings, self._dtype)
        self.phase = (phase, settings)

    def step(self, lr: float, *, skip: bool = False) -> StepOutcome:
        """One optimizer step with the accumulated gradients; not taken when ``skip`` or when they are not finite.

        The norm is global, so all ranks decide alike.
        """
        self._require_training()
        assert self.phase is not None, "use_optimizer comes before step"
        failpoint("train.step")
        with self._active():
            return take_step(self.optimizer, lr, self.phase[1].clip_grad, skip=skip)

    def export(self, *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """The HF tensors that this rank writes, in the model's dtype. Run it to its end on every rank."""
        if gradients:
            self._require_training()
        exported = self._map.export(
            self._require_parameters(),
            data_rank=self.data_rank,
            data_ranks=self.groups.mesh.layout.data,
            group=self.groups.tensor,
            skip_head=self._tied and not self.first_stage,
            gradients=gradients,
        )
        for name, tensor in exported:
            yield name, tensor.to(torch.float32 if gradients else self._dtype)

    def offload(self) -> None:
        """Release device memory until ``onload``, as ``settings.offload`` says; between optimizer steps.

        "optimizer": optimizer state, fp32 master weights, and gradients, which are not kept; "all": parameters, too.
        """
        module = self._require_model()
        if self.settings.offload == "none" or self._offloaded is not None:
            return
        parameters = storages(module.parameters(), self._device)
        kept = storages(optimizer_tensors(self.optimizer), self._device) if self.optimizer is not None else {}
        if self.settings.offload == "all":
            kept |= parameters
        else:
            # Where there are no master weights the optimizer steps the parameters themselves.
            kept = {address: storage for address, storage in kept.items() if address not in parameters}
        buffers = self.ddp_model.buffers if self.ddp_model is not None else []
        self._offloaded = OffloadedMemory(self._device, kept.values(), [buffer.grad_data for buffer in buffers])

    def onload(self) -> None:
        """Undo ``offload``: everything is back bit by bit; gradients are zero."""
        if self._offloaded is not None:
            self._offloaded.give_back()
            self._offloaded = None

    def _require_model(self) -> HiddenStatesModel:
        if self.module is None:
            raise ModelError("this ModelWorker has no model yet: 'initialize' comes first")
        return self.module

    def _require_parameters(self) -> HiddenStatesModel:
        module = self._require_model()
        if self._offloaded is not None and self.settings.offload == "all":
            raise ModelError(f"the model of role {self.settings.name} is offloaded: 'onload' comes before this call")
        return module

    def _require_training(self) -> None:
        self._require_parameters()
        if self.ddp_model is None:
            raise ModelError(f"role {self.settings.name} is frozen: it has no gradients and no optimizer")
        if self._offloaded is not None:
            problem = "the optimizer and the gradients are offloaded: 'onload' comes before this call"
            raise ModelError(f"role {self.settings.name}: {problem}")

    def _require_head(self, head: Literal["lm", "value"]) -> None:
        if self.settings.head != head:
            raise ModelError(f"role {self.settings.name} has head={self.settings.head}; this call needs head={head}")

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        with self.groups.active(), self._device.active():
            yield

    def _trained(self, module: HiddenStatesModel, megatron: TransformerConfig) -> Any:
        """The module with what of it is trained marked, and fp32 gradient buffers for that."""
        if self.settings.lora.rank:
            lora.attach(module, self.settings.lora, self.groups, self._seed)
        gradients = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self._train.distributed_optimizer
        )
        return DistributedDataParallel(megatron, gradients, module)

    def _read(
        self, batches: Sequence[MicroBatch], finish: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Forward pass only; ``finish``: micro-batch, hidden states -> result."""
        module = self._require_parameters()
        with self._active(), torch.no_grad():
            found: list[torch.Tensor] = self._run(
                module,
                batches,
                forward_only=True,
                collect_non_loss_data=True,
                forward_step_func=self._step(finish),
            )
        return found

    def _run(self, model: Any, batches: Sequence[MicroBatch], **schedule: Any) -> Any:
        return self._schedule(
            data_iterator=iter(batches),
            model=[model],
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
            hidden = model(tokens, None, None, packed_seq_params=self._segments(batch))
            # Megatron adds a flag where the result is not a loss.
            return hidden, lambda hidden, non_loss_data=False: finish(batch, hidden)

        return forward_step

    def _segments(self, batch: MicroBatch) -> PackedSegments:
        kernel = self._device.is_cuda and self._dtype is not torch.float32  # the CUDA kernel has no fp32
        return pack_segments(batch.lengths, self._inverse_frequencies, self._dtype, kernel=kernel)

    def _outputs(self, batch: MicroBatch, hidden: torch.Tensor) -> Outputs:
        if self.settings.head == "value":
            return Outputs(values=self._evaluate(hidden, batch.rows))
        logprobs, entropy = self._score(batch, hidden)
        return Outputs(logprobs=logprobs, entropy=entropy)

    def _score(self, batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._require_model()
        assert batch.targets is not None
        tied = self._tied and self.first_stage  # with one stage the embedding is the head
        weight = module.embedding.word_embeddings.weight if tied else module.output_layer.weight
        return projected_logprobs(self._states(hidden, batch.rows), weight, batch.targets, self._scoring)

    def _evaluate(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self._require_model().value_head(self._states(hidden, rows))
        return values

    def _states(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return select_states(hidden, rows, self.groups.tensor, sequence_parallel=self._sequence_parallel)

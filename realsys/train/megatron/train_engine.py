"""The engine of one model role on one rank: build, forward, backward, optimizer step and export
with Megatron-Core.

    load(HF directory) -> logprobs(micro-batches)                       actor_inf, ref_inf
                       -> values, scores(micro-batches)                 critic_inf, reward_inf
                       -> accumulate(micro-batches, loss) -> step(lr)   actor_train, critic_train, sft
                       -> export() -> HF tensors                        save_weights
                       -> offload(), onload()                           between calls

The methods are collectives: every rank of the mesh calls them in the same order, with as many
micro-batches as the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from realsys.cluster.failpoint import failpoint
from realsys.config.roles import RoleSettings
from realsys.config.schema import Config
from realsys.config.sections.schema_train import OptimizerConfig
from realsys.errors import ModelError
from realsys.hf.architecture import HfModel
from realsys.hf.config import read_model
from realsys.hf.rope import inverse_frequencies
from realsys.train.megatron.device import Device, seed_megatron
from realsys.train.megatron.hf_config import DTYPES, transformer_config
from realsys.train.megatron.hf_map import ShardMap
from realsys.train.megatron.layers import lora
from realsys.train.megatron.layers.heads import Head, HiddenStatesModel, Outputs, build_model
from realsys.train.megatron.megatron_core import (
    finalize_model_grads,
)
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.offload import OffloadedMemory, WeightSnapshot, offloaded
from realsys.train.megatron.optimizer import StepOutcome, make_optimizer, optimizer_tensors, take_step, with_gradients
from realsys.train.megatron.pipeline import Schedule
from realsys.train.packing import MicroBatch, last_rows, loss_and_end_rows
from realsys.train.step_gate import StepGate
from realsys.train.vocab_logprob import Scoring

Stats = dict[str, torch.Tensor]

#: micro-batch and outputs -> its share of the step's loss, and its statistics
LossFunction = Callable[[MicroBatch, Outputs], tuple[torch.Tensor, Stats]]


class MegatronEngine:
    """One rank's shard of one role's model; if ``trainable``, also its gradients and its optimizer."""

    def __init__(
        self, config: Config, settings: RoleSettings, groups: MeshGroups, device: Device, *, trainable: bool = True
    ) -> None:
        self.settings = settings
        self.groups = groups
        self.model: HfModel  # set by ``load``
        self.module: HiddenStatesModel | None = None
        self.ddp_model: Any = None  # the module with gradient buffers, if it is trained
        self.optimizer: Any = None
        #: shared by all roles of the worker, which replaces it
        self.gate = StepGate()
        #: parameters of an earlier version, to score tokens that it sampled
        self.snapshot: WeightSnapshot | None = None
        #: phase and settings for which the optimizer's state was made
        self.phase: tuple[str, OptimizerConfig] | None = None
        self._train = config.train
        self._seed = config.seed
        self._timeout_s = config.cluster.request_timeout_s
        self._device = device
        self._trainable = trainable
        self._dtype = DTYPES[config.model.dtype]
        self._dtype_name = config.model.dtype
        self._sequence_parallel = config.train.sequence_parallel and groups.mesh.layout.tensor > 1
        self._scoring = Scoring(
            temperature=config.generation.sampling.temperature,
            chunk=config.train.head_chunk_tokens,
            entropy_gradient=config.train.ppo.entropy_coef > 0,
            group=groups.tensor,
            fp32=config.model.head_dtype == "float32",
        )
        self._offloaded: OffloadedMemory | None = None

    @property
    def token_multiple(self) -> int:
        """Return the number by which the tokens of a micro-batch must divide."""
        return self.groups.mesh.layout.tensor if self._sequence_parallel else 1

    @property
    def parameter_count(self) -> int:
        """Return the number of parameters on this rank."""
        return sum(parameter.numel() for parameter in self._require_model().parameters())

    def load(self, directory: Path) -> None:
        """Build this rank's shard and fill it.

        Every rank of the mesh must call it. Raises ModelError when the model is unusable or does not fit the layout.
        """
        layout = self.groups.mesh.layout
        model = self.model = read_model(directory, self.settings.head)
        megatron = transformer_config(model, layout, self._train, self._dtype_name)
        megatron.finalize_model_grads_func = finalize_model_grads
        frequencies = inverse_frequencies(model.rope, model.head_dim)
        self._map = ShardMap(model, self.groups.tensor_rank, layout.tensor)
        with self._active():
            seed_megatron(self._device, self._seed)
            module = self.module = build_model(model, megatron, self.groups).to(self._device.device)
            # Filled before adapters are attached: these are no part of the HF directory.
            self._map.load(module, directory, self.groups, self._device)
            self._head = Head(
                self.module,
                self.groups,
                replace(self._scoring, vocab=model.vocab),
                kind=self.settings.head,
                sequence_parallel=self._sequence_parallel,
            )
            if self._trainable:
                if self.settings.lora.rank:
                    lora.attach(module, self.settings.lora, self.groups, self._seed)
                self.ddp_model = with_gradients(module, megatron, self._train)
            else:
                module.requires_grad_(False)
            self._schedule = Schedule(
                frequencies.to(self._device.device), model.rope.magnitude, self._dtype, self.token_multiple
            )

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the log-probs of the loss tokens, fp32 [a] per micro-batch; [] before the last stage (lm head)."""
        self._require_head("lm")
        return self._read(batches, lambda batch, hidden: self._head.logprobs(batch, hidden))

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the values of the states of the loss tokens, fp32 [a + n] per micro-batch of n rows. For a value head.

        Per sequence: the state before each of its loss tokens, then the one after the last. [] before the last stage.
        """
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._head.evaluate(hidden, loss_and_end_rows(batch)))

    def scores(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the value at each sequence's last token, fp32 [n] per micro-batch; [] before the last stage.

        For a value head.
        """
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._head.evaluate(hidden, last_rows(batch)))

    def accumulate(
        self, batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float | None = None
    ) -> list[Stats]:
        """Compute the gradient of the sum of ``loss`` over all micro-batches of all data ranks, reduced in fp32.

        ``temperature``: of the log-probs that the loss reads; None: that of generation. Returns the statistics per
        micro-batch; empty before the last stage.
        """
        self._require_training()
        # Megatron's schedule divides the loss by the micro-batches, and its gradient reduction by the data ranks. The
        # shares here are already parts of one sum, so both divisions are undone.
        scale = float(len(batches) * self.groups.mesh.layout.data)

        def scaled_loss(batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            share, stats = loss(batch, self._head.outputs(batch, hidden, temperature))
            return share * scale, stats

        with self._active():
            # The buffers accumulate over micro-batches, and so they would over optimizer steps.
            self.ddp_model.zero_grad_buffer()
            if self.optimizer is not None:
                # After a step each parameter's grad is an alias of the buffer. The backward pass would add it again.
                self.optimizer.zero_grad()
            stats: list[Stats] = self._schedule.run(self.ddp_model, batches, scaled_loss, self.gate, forward_only=False)
        return stats

    def use_optimizer(self, phase: str, settings: OptimizerConfig) -> None:
        """Make the optimizer of ``phase``. A new phase, or new settings, start with fresh optimizer state."""
        self._require_training()
        if self.phase == (phase, settings):
            return
        self.optimizer = None  # freed first: two optimizer states may not fit on the device
        with self._active():
            self.optimizer = make_optimizer(self.ddp_model, settings, self._dtype)
        self.phase = (phase, settings)

    def step(self, lr: float, *, skip: bool = False) -> StepOutcome:
        """Take one optimizer step with the accumulated gradients, unless ``skip`` or they are zero or not finite.

        The norm is global, so all ranks decide alike. Raises StepAbandoned on all ranks alike.
        """
        self._require_training()
        assert self.phase is not None, "call use_optimizer before step"
        failpoint("train.step")
        self.gate.passes(updating=True)
        self.gate.check()
        self._finish_snapshot()
        with self._active():
            outcome = take_step(self.optimizer, lr, self.phase[1].clip_grad, skip=skip)
        lora.merge(self._require_parameters())
        return outcome

    def export(self, *, gradients: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the HF tensors that this rank writes, in the model's dtype; with ``gradients`` their gradients, fp32.

        Every rank must run it to its end: tensors are gathered from the tensor ranks on the way.
        """
        if gradients:
            self._require_training()
        exported = self._map.export(
            self._require_parameters(),
            data_rank=self.groups.data_rank,
            data_ranks=self.groups.mesh.layout.data,
            group=self.groups.tensor,
            skip_head=self._map.model.tied and not self.groups.first_stage,
            gradients=gradients,
        )
        for name, tensor in exported:
            yield name, tensor.to(torch.float32 if gradients else self._dtype)

    def take_snapshot(self, version: int) -> None:
        """Begin to copy this rank's trained parameters, which are those of ``version``, to ``snapshot``."""
        if self.snapshot is None:
            parameters = (each for each in self._require_parameters().parameters() if each.requires_grad)
            self.snapshot = WeightSnapshot(self._device, parameters, self._timeout_s)
        self.snapshot.take(version)

    @contextlib.contextmanager
    def weights_of(self, snapshot: WeightSnapshot) -> Iterator[None]:
        """Use the weights of a snapshot inside the block. Afterwards the weights are as before, bit by bit."""
        module = self._require_parameters()
        try:
            with snapshot.swapped_in():
                lora.merge(module)
                yield
        finally:
            lora.merge(module)

    def _finish_snapshot(self) -> None:
        """Wait for the copy of the parameters, if one runs. Call it before they change or leave the device."""
        if self.snapshot is not None:
            self.snapshot.finish()

    def offload(self) -> None:
        """Release device memory until ``onload``, as ``settings.offload`` says. Call it between optimizer steps."""
        module = self._require_model()
        if self.settings.offload == "none" or self._offloaded is not None:
            return
        self._finish_snapshot()
        parameters = [*module.parameters(), *lora.bases(module)]
        state = optimizer_tensors(self.optimizer) if self.optimizer is not None else ()
        buffers = [buffer.grad_data for buffer in self.ddp_model.buffers] if self.ddp_model is not None else []
        self._offloaded = offloaded(self.settings.offload, self._device, parameters, state, buffers)

    def onload(self) -> None:
        """Undo ``offload``: all tensors are back, bit by bit; gradients are zero."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def _require_model(self) -> HiddenStatesModel:
        if self.module is None:
            raise ModelError("this ModelWorker has no model yet: send 'initialize' first")
        return self.module

    def _require_parameters(self) -> HiddenStatesModel:
        module = self._require_model()
        if self._offloaded is not None and self.settings.offload == "all":
            raise ModelError(f"the model of role {self.settings.name} is offloaded: call 'onload' first")
        return module

    def _require_training(self) -> None:
        self._require_parameters()
        if self.ddp_model is None:
            raise ModelError(
                f"role {self.settings.name} is frozen, without gradients and optimizer: it cannot be trained"
            )
        if self._offloaded is not None:
            problem = "optimizer and gradients are offloaded: call 'onload' first"
            raise ModelError(f"role {self.settings.name}: {problem}")

    def _require_head(self, head: Literal["lm", "value"]) -> None:
        if self.settings.head != head:
            raise ModelError(f"role {self.settings.name} has head={self.settings.head}: this call needs head={head}")

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Enter the role's mesh and device, for calls into Megatron."""
        with self.groups.active(), self._device.active():
            yield

    def _read(
        self, batches: Sequence[MicroBatch], finish: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the forward pass only. Return the results of ``finish`` (micro-batch, hidden states) per micro-batch."""
        module = self._require_parameters()
        with self._active(), torch.no_grad():
            results: list[torch.Tensor] = self._schedule.run(
                module, batches, finish, self.gate, forward_only=True, collect_non_loss_data=True
            )
        return results

"""The engine of one model role on one rank: build, forward, backward, optimizer step and export
with Megatron-Core.

    load(HF directory) -> logprobs(micro-batches)                       actor_inf, ref_inf
                       -> values, scores(micro-batches)                 critic_inf, reward_inf
                       -> accumulate(micro-batches, loss) -> step(lr)   actor_train, critic_train, sft, dpo, ...
                       -> measure(micro-batches, loss)                  the loss of held-out rows
                       -> export() -> HF tensors                        save_weights
                       -> offload(), onload()                           between calls

The methods are collectives: every rank of the mesh calls them in the same order, with as many
micro-batches as the others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from realsys.cluster.failpoint import failpoint
from realsys.config.dataflow import RoleSettings, is_supervised
from realsys.config.schema import Config
from realsys.config.schema_train import OptimizerConfig, TrainConfig
from realsys.errors import ModelError
from realsys.model_files.architecture import HfModel
from realsys.model_files.config_json import read_model
from realsys.model_files.rope import inverse_frequencies
from realsys.train.megatron import lora
from realsys.train.megatron.device import Device, seed_megatron
from realsys.train.megatron.heads import HiddenStatesModel, OutputHead, Outputs, Scoring, build_model
from realsys.train.megatron.hf_model import DTYPES, Exported, ShardMap, transformer_config
from realsys.train.megatron.layers import pack_segments
from realsys.train.megatron.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronOptimizerConfig,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
)
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.offload import OffloadedMemory, WeightSnapshot, offloaded
from realsys.train.step_gate import StepGate
from realsys.train.worker.packing import MicroBatch, last_rows, loss_and_end_rows

T = TypeVar("T")
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
            # Rows of the data were not sampled at a temperature.
            temperature=1.0 if is_supervised(config) else config.generation.sampling.temperature,
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
            self._head = OutputHead(
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

    def top_logprobs(self, batches: Sequence[MicroBatch], k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the k most probable tokens at each loss token, and log-probs (``OutputHead.top_logprobs``), per
        micro-batch; [] before the last stage.
        """
        self._require_head("lm")
        return self._read(batches, lambda batch, hidden: self._head.top_logprobs(batch, hidden, k))

    def values(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the values of the states of the loss tokens, fp32 [a + n] per micro-batch of n rows. For a value head.

        Per sequence: the state before each of its loss tokens, then the one after the last. [] before the last stage.
        """
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._head.evaluate(batch, hidden, loss_and_end_rows(batch)))

    def scores(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the value at each sequence's last token, fp32 [n] per micro-batch; [] before the last stage.

        For a value head.
        """
        self._require_head("value")
        return self._read(batches, lambda batch, hidden: self._head.evaluate(batch, hidden, last_rows(batch)))

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

    def measure(
        self, batches: Sequence[MicroBatch], loss: LossFunction, *, temperature: float | None = None
    ) -> list[Stats]:
        """Return the statistics that ``accumulate`` returns, without gradients: the forward pass only."""
        return self._read(batches, lambda batch, hidden: loss(batch, self._head.outputs(batch, hidden, temperature))[1])

    def use_optimizer(self, phase: str, settings: OptimizerConfig) -> None:
        """Make the optimizer of ``phase``. A new phase, or new settings, start with fresh optimizer state."""
        self._require_training()
        if self.phase == (phase, settings):
            return
        self.optimizer = None  # freed first: two optimizer states may not fit on the device
        with self._active():
            self.optimizer = make_optimizer(self.ddp_model, settings, self._dtype)
        self.phase = (phase, settings)

    def step(self, lr: float, *, skip: bool = False, clip_grad: float | None = None) -> StepOutcome:
        """Take one optimizer step with the accumulated gradients, unless ``skip`` or they are zero or not finite.

        The norm is global, so all ranks decide alike. ``clip_grad``: its bound, 0: none; None: that of the settings.
        Raises StepAbandoned on all ranks alike.
        """
        self._require_training()
        assert self.phase is not None, "call use_optimizer before step"
        failpoint("train.step")
        self.gate.passes(updating=True)
        self.gate.check()
        self._finish_snapshot()
        with self._active():
            bound = self.phase[1].clip_grad if clip_grad is None else clip_grad
            outcome = take_step(self.optimizer, lr, bound, skip=skip)
        lora.merge(self._require_parameters())
        return outcome

    def export(self, what: Exported = "served") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the HF tensors that this rank writes, in the model's dtype; gradients in fp32.

        Every rank must run it to its end: tensors are gathered from the tensor ranks on the way.
        """
        if what == "gradients":
            self._require_training()
        exported = self._map.export(
            self._require_parameters(),
            data_rank=self.groups.data_rank,
            data_ranks=self.groups.mesh.layout.data,
            group=self.groups.tensor,
            skip_head=self._map.model.tied and not self.groups.first_stage,
            what=what,
        )
        for name, tensor in exported:
            yield name, tensor.to(torch.float32 if what == "gradients" else self._dtype)

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

    @property
    def is_offloaded(self) -> bool:
        """True from ``offload`` to ``onload``."""
        return self._offloaded is not None

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

    def _read(self, batches: Sequence[MicroBatch], finish: Callable[[MicroBatch, torch.Tensor], T]) -> list[T]:
        """Run the forward pass only. Return the results of ``finish`` (micro-batch, hidden states) per micro-batch."""
        module = self._require_parameters()
        with self._active(), torch.no_grad():
            results: list[T] = self._schedule.run(
                module, batches, finish, self.gate, forward_only=True, collect_non_loss_data=True
            )
        return results


# ---- optimizer: fp32 master weights, global norm, clipping, skipped steps


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an optimizer step.

    ``applied`` is False if it was not taken, because loss or gradient was not finite, or because the
    gradient was zero.
    """

    grad_norm: float
    applied: bool


def with_gradients(module: torch.nn.Module, megatron: TransformerConfig, train: TrainConfig) -> Any:
    """Return ``module`` with fp32 gradient buffers for its trainable parameters.

    In bf16 the sum over micro-batches and ranks would lose small gradients, and depend on the layout. With
    ``train.distributed_optimizer`` each data rank will step its share of the parameters.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=train.distributed_optimizer,
        overlap_grad_reduce=train.overlap_grad_reduce,
    )
    trained = DistributedDataParallel(megatron, settings, module)
    if train.overlap_grad_reduce:
        # Without it the reduction would begin in the first micro-batch, before the sum is complete.
        megatron.no_sync_func = trained.no_sync
    return trained


def make_optimizer(model: Any, settings: OptimizerConfig, dtype: torch.dtype) -> Any:
    """Return a MegatronOptimizer with fresh state for the trainable parameters of ``model``
    (DistributedDataParallel).

    Raises ModelError for settings that the distributed optimizer does not support.
    """
    distributed: bool = model.ddp_config.use_distributed_optimizer
    if distributed and settings.name != "adam":
        raise ModelError("train.distributed_optimizer supports only AdamW: set name=adam")
    config = MegatronOptimizerConfig(
        optimizer=settings.name,
        lr=settings.lr,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        sgd_momentum=settings.beta1,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Norms and biases have a multiplier of 0, which only Megatron's own scheduler applies.
        # Without this line they would decay like all other weights.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    if settings.name == "adam":
        _fuse(optimizer)
    return optimizer


def _fuse(optimizer: Any) -> None:
    """Let torch's Adam step a parameter in one kernel.

    Megatron makes torch's Adam without this. Its default on a GPU makes temporaries of about the size of the fp32
    parameters. On either device it passes over the memory several times.
    """
    for part in optimizer.chained_optimizers:
        # Transformer Engine's and Apex's Adam are fused already, and have no such flag.
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def take_step(optimizer: Any, lr: float, clip_grad: float, *, skip: bool) -> StepOutcome:
    """Take one step with the reduced gradients, unless ``skip`` is set or their global norm is zero
    or not finite.

    The norm is over all parameters of the mesh, before clipping. With a gradient of zero, momentum
    and weight decay alone would move the weights: no sample would have asked for that.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    # Reduced over the mesh, so all ranks step or skip alike.
    norm = float(optimizer.get_grad_norm())
    if skip or not norm or not math.isfinite(norm):
        return StepOutcome(norm, applied=False)
    # Megatron clips inside its own step. Here NaN is checked before, so clipping is done by hand.
    # One norm scales all parts: a norm per part would change the direction of the gradient.
    if 0 < clip_grad < norm:
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters:
                # In place: Megatron's function allocates a second gradient of each tensor.
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, torch.tensor(norm))
    optimizer.step_with_ready_grads()
    return StepOutcome(norm, applied=True)


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the momenta and the tensors that the optimizer steps: master weights, or fp32
    parameters themselves.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


# ---- pipeline schedule over micro-batches of packed sequences


class Schedule:
    """Megatron's pipeline schedule: runs all micro-batches through all stages. Make it on the active mesh.

    ``inverse_frequencies``, fp32 [head_dim / 2], and ``magnitude``: of the rotary embedding; ``dtype``: of the model.
    ``multiple``: the tokens of a micro-batch divide by it.
    """

    def __init__(
        self, inverse_frequencies: torch.Tensor, magnitude: float, dtype: torch.dtype, multiple: int = 1
    ) -> None:
        self._multiple = multiple
        self._inverse_frequencies = inverse_frequencies
        self._magnitude = magnitude
        # The variable-length kernel of CUDA has no fp32.
        self._kernel = inverse_frequencies.is_cuda and dtype is not torch.float32
        self._dtype = dtype
        # Chosen once: it depends on the pipeline depth of the active mesh.
        self._run = get_forward_backward_func()

    def run(
        self,
        model: Any,
        batches: Sequence[MicroBatch],
        finish: Callable[[MicroBatch, torch.Tensor], Any],
        gate: StepGate,
        **how: Any,
    ) -> Any:
        """Run ``batches`` through ``model``, with further arguments of Megatron's function in ``how``.

        ``finish``: micro-batch, hidden states -> result; it runs on the last stage. Returns the results there, else [].
        Raises StepAbandoned, on all ranks alike, if not all passed ``gate``.
        """

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            # The schedule calls it in the order of the micro-batches, on every stage.
            batch = next(batches)
            if gate.passes():
                failpoint("train.microbatch")
            else:
                # The schedule runs to its end with dummies: every send between stages and every collective still
                # finds its partner.
                batch = batch.dummy(self._multiple)
            tokens = None if batch.tokens is None else batch.tokens[None]
            segments = pack_segments(
                batch.lengths,
                self._inverse_frequencies,
                self._dtype,
                kernel=self._kernel,
                magnitude=self._magnitude,
                parents=batch.parents,
            )
            hidden = model(tokens, None, None, packed_seq_params=segments)
            # Megatron passes a flag for results that are not a loss. ``finish`` is the same for both.
            return hidden, lambda hidden, non_loss_data=False: finish(batch, hidden)

        results = self._run(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # ignored: lengths vary, and each stage sends the shape of its output
            micro_batch_size=1,
            **how,
        )
        gate.check()
        return results

"""Tenants of the training service on one rank: adapters on one base model, each with its own optimizer.

    switch(a) ──> calls of a, step(a) ──> switch(b) ──> calls of b ──> switch(a) ──> ...
                                          a's state moves to host memory, b's takes its place

The state of a tenant on a rank is its trained parameters, the master copies and the state of the optimizer for them,
and the gradients since its last optimizer step. Nothing else that a call reads or writes outlives the call, so a tenant
computes the same bits whatever other tenants do in between: the model draws no random numbers, and every step sets all
settings of the optimizer.

A call computes its gradients afresh in the buffers of the engine. They are then added to ``role.gradients``, and a step
puts the sum back into the buffers. With the distributed optimizer only a rank's own share of a buffer is complete; the
rest is added too, and never read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from realsys.algorithm.client_losses import client_loss
from realsys.algorithm.loss import finish_stats, merge_stats
from realsys.algorithm.loss_tokens import Segments
from realsys.model_calls import Empty, MfcRequest
from realsys.train.checkpoint.saver import Slot, load_checkpoint, slots_of
from realsys.train.megatron import lora
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.offload import OffloadCopies
from realsys.train.megatron.train_engine import Stats
from realsys.train.requests import LoadTenantRequest, StepTenantReply, StepTenantRequest, SwitchTenantRequest
from realsys.train.worker.call_handlers import CallOutcome, Role, onloaded, sequences_per_rank
from realsys.train.worker.optimizer_steps import reduce_stats
from realsys.train.worker.packing import MicroBatch, split_rows

# Names of the tensors of a slot. Every other name is that of an optimizer state.
_PARAMETER, _MASTER = "parameter", "master"


@dataclass(slots=True)
class _Away:
    """State of a tenant that is not the current one, in host memory. Empty: it has not been current yet."""

    memory: OffloadCopies
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[torch.Tensor] | None = None


class Tenants:
    """The tenants of one role on this rank. Every rank of the mesh makes the same calls in the same order."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._states: dict[str, _Away] = {}
        #: the tenant whose state the engine has; None: the role's own
        self.current: str | None = None

    @torch.no_grad()
    def switch(self, request: SwitchTenantRequest) -> Empty:
        """Make a tenant the current one; a new one starts with a drawn adapter and a fresh optimizer."""
        role, tenant = self._role, request.tenant
        for dropped in request.drop:
            self._states.pop(dropped, None)
            if dropped == self.current:
                self.current = None
        if tenant == self.current:
            return Empty()
        with onloaded(role):
            module = role.engine.module
            assert module is not None, "'initialize' comes first"
            role.engine.use_optimizer("train", role.settings.optimizer)
            slots = [slot for slot in slots_of(role) if slot.trained]
            if self.current is not None:
                away = self._states[self.current]
                away.tensors, away.gradients = away.memory.take(_tensors(slots)), role.gradients
            self.current = None  # until the exchange is complete
            state = self._states.setdefault(tenant, _Away(OffloadCopies(role.device)))
            if state.tensors:
                _restore(slots, state.tensors)
            else:
                lora.draw(module, request.seed)
                _restart(slots)
                for slot in slots:
                    slot.master().copy_(slot.parameter.view(-1)[slot.start :][: slot.master().numel()])
            role.gradients, state.gradients = state.gradients, None
            lora.merge(module)
        self.current = tenant
        return Empty()

    def step(self, request: StepTenantRequest) -> StepTenantReply:
        """Take one optimizer step with the pending gradients, which are then dropped.

        Nothing changes if there are none, or if their norm is zero or not finite.
        """
        role, engine = self._role, self._role.engine
        gradients, role.gradients = role.gradients, None
        if gradients is None:
            return StepTenantReply(0.0, applied=False)
        with onloaded(role):
            for buffer, pending in zip(engine.ddp_model.buffers, gradients, strict=True):
                buffer.grad_data.copy_(pending)
            betas = (request.beta1, request.beta2)
            for group in engine.optimizer.param_groups:
                group.update(betas=betas, eps=request.eps, weight_decay=request.weight_decay)
            outcome = engine.step(request.learning_rate, clip_grad=request.grad_clip_norm)
        return StepTenantReply(outcome.grad_norm, outcome.applied)

    def load(self, request: LoadTenantRequest) -> Empty:
        """Replace the state of the current tenant by a checkpoint. Raises CheckpointError."""
        role = self._role
        with onloaded(role):
            load_checkpoint(role, Path(request.directory), trained_only=True)
            if not request.optimizer:
                _restart(slots_of(role))
        role.gradients = None
        return Empty()


def _restart(slots: Iterable[Slot]) -> None:
    """Make the optimizer's next step its first."""
    for slot in slots:
        if slot.held is not None:
            slot.held.restore({})


def _tensors(slots: Sequence[Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, slot in enumerate(slots):
        states = slot.held.tensors() if slot.held is not None else {}
        for name, value in {_PARAMETER: slot.parameter, _MASTER: slot.master(), **states}.items():
            yield f"{number}/{name}", value


def _restore(slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> None:
    by_slot: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        place, kind = name.split("/", 1)
        by_slot[int(place)][kind] = value
    for number, slot in enumerate(slots):
        slot.parameter.copy_(by_slot[number].pop(_PARAMETER))
        slot.master().copy_(by_slot[number].pop(_MASTER))
        if slot.held is not None:
            slot.held.restore(by_slot[number])


class TenantLoss:
    """Handler of ``tenant_loss``: a loss of the client, a sum over the tokens of all data ranks.

    Arguments: ``loss``, ``config`` (``realsys.algorithm.client_losses``), and ``backward``, with which the gradient is
    added to the pending ones. The log-probs, at temperature 1, are stored as ``prox_logprobs``.
    """

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        name, config, backward = (request.args[key] for key in ("loss", "config", "backward"))
        batches = role.microbatches(
            sequences_per_rank(request), ["behav_logprobs", "advantages"], gradients=bool(backward)
        )
        scored: list[tuple[MicroBatch, torch.Tensor]] = []

        def loss(batch: MicroBatch, outputs: Outputs) -> tuple[torch.Tensor, Stats]:
            theta = outputs.logprobs
            assert theta is not None
            scored.append((batch, theta.detach()))
            old, advantages = batch.arrays["behav_logprobs"], batch.arrays["advantages"]
            segments = Segments(torch.tensor([ref.loss_tokens for ref in batch.refs], dtype=torch.int64))
            return client_loss(name, theta, old, advantages, segments, config)

        compute = role.engine.accumulate if backward else role.engine.measure
        stats = merge_stats(compute(batches, loss, temperature=1.0))
        if backward:
            _add_gradients(role)
        for batch, logprobs in scored:
            for sample_id, values in split_rows(batch, logprobs).items():
                role.data.put(sample_id, {"prox_logprobs": values})
        if not role.groups.last_stage:
            return CallOutcome()
        totals = reduce_stats(stats, role)
        means = finish_stats(totals) if totals["tokens"] else {}  # else they would be NaN
        return CallOutcome({**means, "tokens": totals["tokens"], "loss_sum": totals["loss_sum"]})


def _add_gradients(role: Role) -> None:
    """Add the gradients of the last call to the pending ones of the current tenant."""
    found = [buffer.grad_data for buffer in role.engine.ddp_model.buffers]
    if role.gradients is None:
        role.gradients = [gradient.to("cpu", copy=True) for gradient in found]
    else:
        for pending, gradient in zip(role.gradients, found, strict=True):
            pending += gradient.cpu()

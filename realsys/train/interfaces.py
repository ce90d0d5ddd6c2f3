"""What a model function call does with the engine: one class per interface, found by name.

    actor_inf     tokens                                  -> prox_logprobs (last stage)
    actor_train   tokens, behav_logprobs, prox_logprobs   -> one optimizer step per minibatch
    sft           tokens                                  -> one optimizer step per minibatch

Every rank of the mesh runs the same call; what it needs to know of the others it derives from the request, in which
all ranks' sequences stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from realsys.algorithm.advantages import outcome_advantages
from realsys.algorithm.loss import finish_stats, is_maximum, merge_stats, ppo_actor_loss, sft_loss
from realsys.buffer.microbatch import pack_equal
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.train.data_manager import DataManager
from realsys.train.device import Device
from realsys.train.engine import LossFunction, MegatronEngine, Stats, data_ranks_reduce
from realsys.train.mesh import any_rank
from realsys.train.packing import MicroBatch, Packer, split_answers
from realsys.types import MfcRequest, SequenceRef


@dataclass(slots=True)
class Role:
    """One model role on this rank, and what its interfaces work with."""

    config: Config
    engine: MegatronEngine
    data: DataManager
    packer: Packer
    device: Device
    #: optimizer steps not taken since the start, because loss or gradient was not finite
    skipped_steps: int = 0

    def microbatches(
        self, per_rank: Sequence[Sequence[SequenceRef]], answer_keys: Sequence[str] = ()
    ) -> list[MicroBatch]:
        """This rank's micro-batches of ``per_rank`` (all data ranks' sequences): as many as every other rank has.

        Never none: the collectives of a step are run also when no rank has anything to compute.
        """
        train = self.config.train
        lengths = [[ref.length for ref in refs] for refs in per_rank]
        plan = pack_equal(lengths, train.microbatch_tokens, train.min_microbatches)[self.engine.data_rank]
        refs = per_rank[self.engine.data_rank]
        return [self.packer.pack([refs[i] for i in batch], answer_keys) for batch in plan or [[]]]


class Interface(Protocol):
    """``run`` returns statistics that are reduced over the mesh; on ranks before the last stage they are partial."""

    def run(self, role: Role, request: MfcRequest) -> dict[str, float]: ...


@dataclass(slots=True)
class _Steps:
    """The optimizer steps of one call: their statistics, and what became of them."""

    role: Role
    lr: float
    merged: Stats = field(default_factory=dict)
    answer_tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def take(self, batches: Sequence[MicroBatch], loss: LossFunction, answer_tokens: int) -> None:
        """Gradient and step of one minibatch that has ``answer_tokens`` over all ranks."""
        role = self.role
        found = merge_stats(role.engine.accumulate(batches, loss))
        bad_loss = any_rank("loss_sum" in found and not math.isfinite(found["loss_sum"].item()), role.device)
        outcome = role.engine.step(self.lr, skip=bad_loss)
        if not outcome.applied:
            # Its NaN would hide what the other minibatches did.
            self.skipped += 1
            role.skipped_steps += 1
            return
        self.grad_norms.append(outcome.grad_norm)
        self.answer_tokens += answer_tokens
        self.merged = merge_stats([self.merged, found])

    def finish(self) -> dict[str, float]:
        """Means are over the answer tokens that were computed (``tokens``), ``loss`` over all (``answer_tokens``)."""
        norms = self.grad_norms
        stats = {
            "lr": self.lr,
            "optimizer_steps": float(len(norms)),
            "skipped_steps": float(self.skipped),
            "skipped_steps_total": float(self.role.skipped_steps),
            "answer_tokens": float(self.answer_tokens),
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "grad_norm_max": max(norms) if norms else math.nan,
        }
        if self.role.engine.last_stage and self.merged:
            totals = reduced(self.merged, self.role.device)
            stats |= finish_stats(totals)
            stats["loss"] = totals["loss_sum"] / max(1, self.answer_tokens)
        elif not norms:
            stats["loss"] = math.nan
        return stats


class ActorInference:
    """Proximal log-probs: of the answer tokens under the weights before the step's first update.

    Its statistics compare them with the recorded ones: with equal weights that is the numerical mismatch between the
    generation engine and the trainer, else off-policyness comes on top.
    """

    def run(self, role: Role, request: MfcRequest) -> dict[str, float]:
        data_ranks = range(len(request.minibatches[0]))
        per_rank = [[ref for minibatch in request.minibatches for ref in minibatch[d]] for d in data_ranks]
        skipped: list[SequenceRef] = []
        if role.config.train.ppo.skip_zero_advantage:
            advantages = batch_advantages(request, role.config)
            skipped = [ref for ref in per_rank[role.engine.data_rank] if advantages[ref.sample_id] == 0.0]
            per_rank = _without_zero(per_rank, advantages)
        batches = role.microbatches(per_rank)
        proximal, recorded = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
        for batch, logprobs in zip(batches, role.engine.logprobs(batches), strict=role.engine.last_stage):
            for sample_id, values in split_answers(batch, logprobs).items():
                role.data.put(sample_id, {"prox_logprobs": values})
                if role.data.has(sample_id, "behav_logprobs"):
                    proximal.append(values)
                    recorded.append(role.data.get(sample_id, "behav_logprobs"))
        if not role.engine.last_stage:
            return {}
        for ref in skipped:
            # Nobody will look at them, but the master may plan with every sequence having its array.
            role.data.put(ref.sample_id, {"prox_logprobs": np.zeros(ref.answer_len, np.float32)})
        difference = torch.from_numpy(np.abs(np.concatenate(proximal) - np.concatenate(recorded)))
        stats = {
            "tokens": torch.tensor(float(len(difference))),
            "logprob_difference_sum": difference.sum(),
            "logprob_difference_max": difference.amax() if len(difference) else torch.zeros(()),
        }
        return finish_stats(reduced(stats, role.device))


class ActorTrain:
    """Decoupled PPO. Advantages are of the whole batch; each minibatch is one optimizer step."""

    def run(self, role: Role, request: MfcRequest) -> dict[str, float]:
        ppo = role.config.train.ppo
        role.engine.use_optimizer("train", role.config.train.optimizer)
        steps = _Steps(role, _learning_rate(request))
        advantages = batch_advantages(request, role.config)
        keys = ["behav_logprobs", "prox_logprobs"] if ppo.use_decoupled_loss else ["behav_logprobs"]
        for minibatch in request.minibatches:
            denominator = count_answer_tokens(minibatch)
            per_rank = _without_zero(minibatch, advantages) if ppo.skip_zero_advantage else minibatch

            def loss(
                batch: MicroBatch, theta: torch.Tensor, entropy: torch.Tensor, denominator: int = denominator
            ) -> tuple[torch.Tensor, Stats]:
                behav = batch.answers["behav_logprobs"]
                share, stats = ppo_actor_loss(
                    theta,
                    batch.answers.get("prox_logprobs", behav),
                    behav,
                    role.packer.per_answer_token(batch, [advantages[ref.sample_id] for ref in batch.refs]),
                    torch.ones_like(theta, dtype=torch.bool),
                    max(1, denominator),
                    ppo,
                )
                return share, stats | {"entropy_sum": entropy.sum()}

            steps.take(role.microbatches(per_rank, keys), loss, denominator)
        return steps.finish()


class Sft:
    """Negative log-likelihood of the demonstrated answers, with the warm-up's optimizer."""

    def run(self, role: Role, request: MfcRequest) -> dict[str, float]:
        role.engine.use_optimizer("warmup", role.config.warmup.optimizer)
        steps = _Steps(role, _learning_rate(request))
        for minibatch in request.minibatches:
            denominator = count_answer_tokens(minibatch)

            def loss(
                batch: MicroBatch, theta: torch.Tensor, entropy: torch.Tensor, denominator: int = denominator
            ) -> tuple[torch.Tensor, Stats]:
                share, stats = sft_loss(theta, torch.ones_like(theta, dtype=torch.bool), max(1, denominator))
                return share, stats | {"entropy_sum": entropy.sum()}

            steps.take(role.microbatches(minibatch), loss, denominator)
        return steps.finish()


INTERFACES: Mapping[str, Interface] = {"actor_inf": ActorInference(), "actor_train": ActorTrain(), "sft": Sft()}


def find_interface(name: str) -> Interface:
    if name not in INTERFACES:
        raise ModelError(f"unknown interface {name!r}; known: {', '.join(sorted(INTERFACES))}")
    return INTERFACES[name]


def batch_advantages(request: MfcRequest, config: Config) -> dict[str, float]:
    """Sample id -> advantage, over the whole batch; the same on every rank without a message."""
    refs = sorted(
        (ref for minibatch in request.minibatches for part in minibatch for ref in part),
        key=lambda ref: ref.sample_id,  # one order of summation, whatever the layout
    )
    return dict(zip((r.sample_id for r in refs), outcome_advantages(refs, config.train.ppo).tolist(), strict=True))


def count_answer_tokens(minibatch: Iterable[Iterable[SequenceRef]]) -> int:
    return sum(ref.answer_len for part in minibatch for ref in part)


def reduced(stats: Stats, device: Device) -> dict[str, float]:
    """Statistics of this rank -> of all data ranks of its stage."""
    plain = {name: value.item() for name, value in stats.items()}
    sums = data_ranks_reduce({k: v for k, v in plain.items() if not is_maximum(k)}, device, maxima=False)
    return sums | data_ranks_reduce({k: v for k, v in plain.items() if is_maximum(k)}, device, maxima=True)


def _without_zero(
    per_rank: Sequence[Sequence[SequenceRef]], advantages: Mapping[str, float]
) -> list[list[SequenceRef]]:
    return [[ref for ref in refs if advantages[ref.sample_id] != 0.0] for refs in per_rank]


def _learning_rate(request: MfcRequest) -> float:
    if "lr" not in request.args:
        raise ModelError(f"{request.mfc}: args lack 'lr'; the master owns the schedule")
    return float(request.args["lr"])

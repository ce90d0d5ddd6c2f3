"""Training on rows of ``data.demos``: demonstrations, and pairs of a chosen and a rejected response.

    sft            log-probs of the loss tokens              token mean over the minibatch
    dpo            log-probs summed by row, by pair [n, 2]   mean over the pairs of the minibatch
    reward_model   scores of the last tokens, by pair        mean over the pairs of the minibatch

One optimizer step per minibatch. With the argument ``measure`` a call computes the same statistics on rows that are
held out, and takes no step. Rows of the data were not sampled by the policy, so their log-probs have temperature 1: at
the sampling temperature T the model would learn a distribution that is flatter than theirs by 1 / T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from realsys.algorithm.loss_tokens import row_sums
from realsys.algorithm.supervised import dpo_loss, reward_loss, sft_loss
from realsys.cluster.gpu_devices import on_device
from realsys.config.schema_train import OBJECTIVES
from realsys.model_calls import MEASURE, MfcRequest
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import Stats
from realsys.train.worker.call_handlers import CallOutcome, Role
from realsys.train.worker.optimizer_steps import OptimizerSteps, call_argument, count_loss_tokens
from realsys.train.worker.packing import MicroBatch, last_rows
from realsys.types import SequenceRef

#: (micro-batch, outputs, denominator) -> share of the loss, and statistics
Objective = Callable[[MicroBatch, Outputs, float], tuple[torch.Tensor, Stats]]


class Sft:
    """Handler of ``sft``: the negative log-likelihood of the demonstrated completions."""

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        return _train(role, request, _sft, count_loss_tokens)


class Dpo:
    """Handler of ``dpo``: direct preference optimisation towards the stored log-probs of the reference."""

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        return _train(role, request, partial(_dpo, **_arguments(role, "dpo")), _count_pairs, ["ref_logprobs"])


class RewardModel:
    """Handler of ``reward_model``: the chosen response gets the higher score."""

    def run(self, role: Role, request: MfcRequest) -> CallOutcome:
        objective = partial(_reward_model, **_arguments(role, "reward_model"))
        return _train(role, request, objective, _count_pairs, scored=True)


def _train(
    role: Role,
    request: MfcRequest,
    objective: Objective,
    count: Callable[[Sequence[Sequence[SequenceRef]]], int],
    keys: Sequence[str] = (),
    *,
    scored: bool = False,
) -> CallOutcome:
    """Take the optimizer steps of a call, or measure.

    count    of the rows of all data ranks of a minibatch: the denominator of its loss
    keys     the stored arrays that the objective reads
    scored   True if it reads the scores of the rows
    """
    measures = bool(request.args.get(MEASURE))
    if not measures:
        # Before the first version there is only the warm-up.
        is_warmup = request.version < 0
        optimizer = role.config.warmup.optimizer if is_warmup else role.settings.optimizer
        role.engine.use_optimizer("warmup" if is_warmup else "train", optimizer)
    steps = OptimizerSteps(role, None if measures else call_argument(request, "lr"), temperature=1.0)
    for minibatch in request.minibatches:
        denominator = float(max(1, count(minibatch)))
        batches = role.microbatches(minibatch, keys, gradients=not measures)
        if scored and role.groups.last_stage:
            for batch in batches:
                batch.ends = last_rows(batch)

        def loss(batch: MicroBatch, outputs: Outputs, denominator: float = denominator) -> tuple[torch.Tensor, Stats]:
            return objective(batch, outputs, denominator)

        steps.take(minibatch, batches, loss, denominator)
    return CallOutcome(steps.finish())


def _arguments(role: Role, handler: str) -> dict[str, Any]:
    """Return the keyword arguments of the objective."""
    return OBJECTIVES[handler].model_validate(role.config.train.ppo.loss_args).model_dump()


def _sft(batch: MicroBatch, outputs: Outputs, denominator: float) -> tuple[torch.Tensor, Stats]:
    theta, entropy, highest = outputs.logprobs, outputs.entropy, outputs.highest
    assert theta is not None and entropy is not None and highest is not None
    share, stats = sft_loss(theta, torch.ones_like(theta, dtype=torch.bool), denominator)
    greedy = (theta.detach() >= highest).sum()  # tokens that are the most probable ones
    return share, stats | {"entropy_sum": entropy.detach().sum(), "accuracy_sum": greedy.float()}


def _dpo(batch: MicroBatch, outputs: Outputs, denominator: float, **arguments: Any) -> tuple[torch.Tensor, Stats]:
    theta = outputs.logprobs
    assert theta is not None
    lengths = torch.tensor([ref.loss_tokens for ref in batch.refs], dtype=torch.int64)
    pairs = pairs_of(batch.refs, theta.device)
    # float64: the margin is a small difference of sums over thousands of tokens
    policy, reference = (row_sums(x.double(), lengths)[pairs] for x in (theta, batch.arrays["ref_logprobs"]))
    share, stats = dpo_loss(policy, reference, on_device(lengths, theta.device)[pairs], denominator, **arguments)
    return share.float(), stats


def _reward_model(
    batch: MicroBatch, outputs: Outputs, denominator: float, **arguments: Any
) -> tuple[torch.Tensor, Stats]:
    scores = outputs.scores
    assert scores is not None
    share, stats = reward_loss(scores.double()[pairs_of(batch.refs, scores.device)], denominator, **arguments)
    return share.float(), stats


def pairs_of(refs: Sequence[SequenceRef], device: torch.device) -> torch.Tensor:
    """Return the numbers of the rows of each pair among ``refs``, the chosen one first, int64 [n, 2] on ``device``.

    A pair is an episode of two rows, and the rejected one is its last. A micro-batch has them in any order, and whole:
    a pair that is longer than a micro-batch is refused before the start.
    """
    chosen = {ref.episode: number for number, ref in enumerate(refs) if not ref.last}
    rejected = {ref.episode: number for number, ref in enumerate(refs) if ref.last}
    assert chosen.keys() == rejected.keys() and 2 * len(chosen) == len(refs), "a micro-batch has a part of a pair"
    numbers = [(row, rejected[episode]) for episode, row in sorted(chosen.items())]
    return on_device(torch.from_numpy(np.array(numbers, np.int64).reshape(-1, 2)), device)


def _count_pairs(minibatch: Sequence[Sequence[SequenceRef]]) -> int:
    return sum(ref.last for part in minibatch for ref in part)

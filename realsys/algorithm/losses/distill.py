"""Divergence to the k most probable tokens of a teacher, with an exact gradient (GKD, 2306.13649, on its top k)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from realsys.algorithm.kl import MAX_LOG_RATIO
from realsys.algorithm.losses.contract import LossInputs

#: Least probability of the rest. Below it the rest, which is 1 minus a sum of k probabilities, is noise in float32.
_LEAST_REST = 1e-5


def distill(inputs: LossInputs, top_k: int, beta: float = 1.0) -> Tensor:
    """Compute a divergence of student p and teacher q over k + 1 events: the teacher's top k tokens, and the rest.

        beta 1         KL(p || q) = sum_i p_i (log p_i - log q_i), the reverse KL
        beta 0         KL(q || p), the forward KL
        between        beta KL(q || m) + (1 - beta) KL(p || m),   m = beta q + (1 - beta) p

    The rest has the probability that the k tokens leave, so nothing is renormalised. By the log-sum inequality the
    result is at most the divergence over the whole vocabulary.
    """
    if inputs.top_theta is None or inputs.top_teacher is None:
        raise ValueError("loss=distill reads teacher_tokens and teacher_logprobs: the call actor_train must get them")
    # A token that the student does not have belongs to the rest; a teacher may write -9999 for a log-prob of -inf.
    lacking = torch.isneginf(inputs.top_theta)
    p = _with_rest(inputs.top_theta.masked_fill(lacking, -MAX_LOG_RATIO))
    q = _with_rest(inputs.top_teacher.masked_fill(lacking, -MAX_LOG_RATIO).clamp(min=-MAX_LOG_RATIO))
    if beta in (0.0, 1.0):
        return _kl(p, q) if beta else _kl(q, p)
    mixture = torch.logaddexp(q + math.log(beta), p + math.log(1 - beta))
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens: [t, k] -> [t, k + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST).log()
    return torch.cat([logprobs, rest], -1)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(-1)

"""Projection, log-probs and entropy in one function, against autograd of the formulas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.schema import Config
from realsys.train.megatron.device import Device
from realsys.train.megatron.heads import Scoring, projected_logprobs
from tests.support.training.train_ranks import FORMED, run_ranks

ROWS, HIDDEN, VOCAB, TEMPERATURE = 9, 6, 24, 0.6


def inputs() -> tuple[torch.Tensor, ...]:
    """hidden, weight, targets, and the gradients of log-probs and entropies."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN) * 2, torch.randn(VOCAB, HIDDEN)
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,)), torch.randn(ROWS), torch.randn(ROWS)


def warmer(mixed: bool) -> float | torch.Tensor:
    """Return one temperature, or one for each row."""
    return torch.linspace(0.5, 1.5, ROWS) if mixed else TEMPERATURE


def naive(*, with_entropy: bool, mixed: bool = False) -> tuple[torch.Tensor, ...]:
    """log-probs, entropies, gradient of hidden, gradient of weight."""
    hidden, weight, targets, upstream, upstream_entropy = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    every = (hidden @ weight.t() / torch.as_tensor(warmer(mixed)).view(-1, 1)).log_softmax(-1)
    logprobs, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    loss = (logprobs * upstream).sum()
    if with_entropy:
        loss = loss + (entropy * upstream_entropy).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.processes
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_values_and_gradients_are_those_of_the_formulas(tensor_ranks: int) -> None:
    cases = list(itertools.product((0, 4), (False, True), (False, True)))  # rows at a time, entropy bonus, temperatures

    def body(rank: int, device: Device) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for chunk, with_entropy, mixed in cases:
            hidden, weight, targets, upstream, upstream_entropy = inputs()
            hidden.requires_grad_()
            shard = weight.chunk(tensor_ranks)[rank].clone().requires_grad_()
            how = Scoring(warmer(mixed), chunk, with_entropy, FORMED[ACTOR].tensor)
            logprobs, entropy = projected_logprobs(hidden, shard, targets, how)
            assert entropy is not None and entropy.requires_grad == with_entropy
            loss = (logprobs * upstream).sum()
            if with_entropy:
                loss = loss + (entropy * upstream_entropy).sum()
            loss.backward()
            assert hidden.grad is not None and shard.grad is not None
            found.append((logprobs.detach(), entropy.detach(), hidden.grad, shard.grad))
        return found

    ranks = run_ranks(tensor_ranks, body, Config(), ParallelLayout(tensor=tensor_ranks))
    for case, (_, with_entropy, mixed) in enumerate(cases):
        *expected, weight_grad = naive(with_entropy=with_entropy, mixed=mixed)
        for rank in ranks:
            for got, wanted in zip(rank[case][:3], expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat([rank[case][3] for rank in ranks]), weight_grad, atol=1e-5, rtol=1e-5)


def test_no_rows_give_no_gradient() -> None:
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    for chunk in (0, 4):
        logprobs, entropy = projected_logprobs(
            hidden, weight, torch.zeros(0, dtype=torch.int64), Scoring(chunk=chunk, entropy_gradient=True)
        )
        assert entropy is not None and logprobs.shape == entropy.shape == (0,)
        weight.grad = None
        (logprobs.sum() + entropy.sum()).backward()
        assert weight.grad is not None and not weight.grad.any()


def test_certain_token_has_zero_entropy_finite_gradient() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[500.0], [0.0]])  # a probability of exp(-500), which fp32 does not have
    logprobs, entropy = projected_logprobs(hidden, weight, torch.tensor([0]), Scoring(entropy_gradient=True))
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == entropy.item() == 0.0
    assert hidden.grad is not None and hidden.grad.item() == 0.0


def test_bfloat16_logits_give_fp32_log_probs() -> None:
    hidden, weight, targets, upstream, _ = inputs()
    low, low_weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    logprobs, entropy = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, 4))
    assert entropy is not None and logprobs.dtype is entropy.dtype is torch.float32
    (logprobs * upstream).sum().backward()
    assert low.grad is not None and low.grad.dtype is torch.bfloat16
    expected = naive(with_entropy=False)
    torch.testing.assert_close(logprobs.detach(), expected[0], atol=0.2, rtol=0.03)
    assert low_weight.grad is not None
    torch.testing.assert_close(low_weight.grad.float(), expected[3], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("chunk", [0, 4])
def test_fp32_head_does_not_round_the_logits(chunk: int) -> None:
    hidden, weight, targets, upstream, _ = inputs()
    low, low_weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    every = (low.detach().float() @ low_weight.detach().float().t() / TEMPERATURE).log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0]
    rounded, _ = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, chunk))
    logprobs, _ = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, chunk, fp32=True))
    assert (rounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    (logprobs * upstream).sum().backward()
    assert low_weight.grad is not None and low_weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(low_weight.grad.float(), naive(with_entropy=False)[3], atol=0.1, rtol=0.05)


class Operations(TorchDispatchMode):
    """The operations whose result is as large as all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (ROWS, VOCAB):
            self.names.append(func.overloadpacket.__name__)
        return out


def test_inference_makes_no_softmax_and_no_entropy() -> None:
    hidden, weight, targets, *_ = inputs()
    weight.requires_grad_()  # a trained head, which has a gradient in no call of inference
    with Operations() as seen, torch.no_grad():
        logprobs, entropy = projected_logprobs(hidden, weight, targets, Scoring(entropy=False))
    assert entropy is None
    assert seen.names == ["mm", "sub_", "exp"]
    torch.testing.assert_close(logprobs, projected_logprobs(hidden, weight, targets, Scoring())[0].detach())


def test_only_one_logits_chunk_exists_at_once() -> None:
    """Seen by the largest result of any operation, forward and backward."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == VOCAB:
                    self.elements = max(self.elements, tensor.numel())
            return out

    hidden, weight, targets, upstream, _ = inputs()
    hidden, weight = hidden[:, :2].clone().requires_grad_(), weight[:, :2].clone()  # a weight smaller than a chunk
    with Largest() as seen:
        logprobs, _ = projected_logprobs(hidden, weight, targets, Scoring(chunk=4))
        (logprobs * upstream).sum().backward()
    assert seen.elements == 4 * VOCAB

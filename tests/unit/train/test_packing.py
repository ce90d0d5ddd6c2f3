"""Packing of sequences into micro-batches, and attention buckets: no process group."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.cluster.gpu_devices import on_device
from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.schema import Config
from realsys.train.megatron.heads import Scoring, projected_logprobs, top_tokens
from realsys.train.megatron.layers import make_buckets, pack_segments
from realsys.train.worker.data_manager import DataManager
from realsys.train.worker.packing import MicroBatchPacker, last_rows, loss_and_end_rows, split_rows
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_mask, make_ref
from tests.support.training.train_ranks import FORMED, run_ranks


def make_packer(data, multiple=1, *, first=True, last=True):
    return MicroBatchPacker(data, torch.device("cpu"), multiple=multiple, first=first, last=last)


def filled():
    data = DataManager(0)
    data.put("a", {"tokens": np.array([1, 2, 3]), "loss_mask": make_mask(3, 2), "behav_logprobs": np.array([-0.1])})
    data.put("b", {"tokens": np.array([4, 5, 6, 7, 8]), "loss_mask": make_mask(5, 2)})
    data.put("b", {"behav_logprobs": np.array([-0.2, -0.3, -0.4])})
    return data, [make_ref("a", 3, 2), make_ref("b", 5, 2)]


def test_rows_point_one_before_the_answer_tokens():
    data, refs = filled()
    batch = make_packer(data, 4).pack(refs, ["behav_logprobs"])
    assert batch.tokens.tolist() == [4, 5, 6, 7, 8, 1, 2, 3]  # longest first
    assert batch.lengths == [5, 3]
    assert batch.rows.tolist() == [1, 2, 3, 6]
    assert batch.targets.tolist() == [6, 7, 8, 3]
    assert batch.tokens[batch.rows + 1].tolist() == batch.targets.tolist()
    assert batch.arrays["behav_logprobs"].tolist() == pytest.approx([-0.2, -0.3, -0.4, -0.1])


def test_multi_turn_rows_point_before_loss_tokens():
    """Two turns in one row: feedback between them is context, and no row predicts it."""
    data = DataManager(0)
    mask = np.array([False, True, True, False, False, True, False])
    data.put("turns", {"tokens": np.arange(10, 17), "loss_mask": mask, "behav_logprobs": np.array([-1.0, -2.0, -3.0])})
    data.put(
        "one", {"tokens": np.arange(20, 23), "loss_mask": make_mask(3, 1), "behav_logprobs": np.array([-4.0, -5.0])}
    )
    refs = [SequenceRef("one", 3, 2, 0.0, False, 0, 0, 2), SequenceRef("turns", 7, 3, 0.0, False, 0, 1, 3)]
    batch = make_packer(data).pack(refs, ["behav_logprobs"])
    assert batch.targets is not None and batch.targets.tolist() == [11, 12, 15, 21, 22]
    assert batch.rows.tolist() == [0, 1, 4, 7, 8]
    assert batch.arrays["behav_logprobs"].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert loss_and_end_rows(batch).tolist() == [0, 1, 4, 5, 7, 8, 9]
    assert last_rows(batch).tolist() == [6, 9]
    parts = split_rows(batch, torch.arange(7.0), end=True)
    assert {name: part.tolist() for name, part in parts.items()} == {"turns": [0, 1, 2, 3], "one": [4, 5, 6]}


def test_rows_that_begin_alike_are_packed_once():
    """Two are equal, and nothing is left of one of them."""
    data, refs = DataManager(0), []
    rows = [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 8, 9]]
    for k, (row, shared) in enumerate(zip(rows, shared_beginnings([np.array(row) for row in rows]), strict=True)):
        data.put(f"{k}", {"tokens": np.array(row), "loss_mask": make_mask(len(row), 3)})
        refs.append(replace(make_ref(f"{k}", len(row), 3), shared=shared))
    batch = make_packer(data, 4).pack(refs)
    assert batch.tokens.tolist() == [4, 5, 6, 8, 9, 7, 0, 0] and batch.lengths == [3, 2, 1, 2]
    assert batch.parents == [(), (0,), (0,), ()]
    assert batch.rows.tolist() == [2, 3, 2, 2] and batch.targets.tolist() == [8, 9, 7, 7]
    assert last_rows(batch).tolist() == [4, 5, 5]
    equal = make_packer(data).pack(refs[:2])
    assert equal.tokens is not None and equal.tokens.tolist() == [4, 5, 6, 7] and equal.lengths == [4]
    assert equal.rows.tolist() == [2, 2] and equal.parents == [()] and loss_and_end_rows(equal).tolist() == [2, 3, 2, 3]


def test_mask_must_match_the_plan():
    data = DataManager(0)
    data.put("s", {"tokens": np.arange(4), "loss_mask": make_mask(4, 2)})
    with pytest.raises(AssertionError, match=r"loss tokens per sequence: \[2\] here, \[3\] in the plan"):
        make_packer(data).pack([make_ref("s", 4, 1)])
    data.put("s", {"loss_mask": make_mask(4, 0)})
    with pytest.raises(AssertionError, match="the first token of a sequence is in the loss"):
        make_packer(data).pack([make_ref("s", 4, 0)])


def test_padding_is_own_segment_without_rows():
    data, refs = filled()
    batch = make_packer(data, 6).pack(refs)
    assert batch.lengths == [5, 3, 4]
    assert batch.tokens is not None and batch.tokens.tolist()[8:] == [0] * 4
    assert int(batch.rows.max()) < 8


def test_an_empty_micro_batch_is_one_masked_segment():
    batch = make_packer(DataManager(0), 2).pack([], ["behav_logprobs"])
    assert batch.lengths == [2]
    assert batch.tokens is not None and len(batch.tokens) == 2
    assert len(batch.rows) == 0
    assert batch.targets is not None and len(batch.targets) == 0
    assert len(batch.arrays["behav_logprobs"]) == 0


def test_a_stage_between_needs_no_arrays():
    batch = make_packer(DataManager(0), first=False, last=False).pack([make_ref("elsewhere", 5, 2)], ["behav_logprobs"])
    assert batch.tokens is None and batch.targets is None and not batch.arrays
    assert sum(batch.lengths) == 5


def test_answers_go_back_to_their_samples():
    data, refs = filled()
    batch = make_packer(data).pack(refs)
    parts = split_rows(batch, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert {name: part.tolist() for name, part in parts.items()} == {"b": [1.0, 2.0, 3.0], "a": [4.0]}


def test_values_per_sequence_are_spread_over_answer_tokens():
    data, refs = filled()
    packer = make_packer(data)
    assert packer.per_loss_token(packer.pack(refs), [0.5, -2.0]).tolist() == [0.5, 0.5, 0.5, -2.0]


def test_buckets_cover_tokens_once_and_pad_behind():
    lengths = [400, 90, 88, 60, 60, 60, 9, 7, 1, 1, 4]  # the dummy at the end may be longer than its neighbour
    buckets = make_buckets(lengths, torch.device("cpu"), torch.float32)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
    assert buckets[-1].stop == sum(lengths)
    assert sum(b.count for b in buckets) == len(lengths)
    assert len(buckets) < len(lengths)
    for bucket in buckets:
        size = bucket.stop - bucket.start
        if bucket.gather is None:
            assert bucket.count * bucket.width == size
            continue
        assert bucket.scatter is not None and bucket.real is not None
        assert bucket.gather[bucket.scatter].tolist() == list(range(size))
        assert int(bucket.real.sum()) == size
        real = bucket.real.reshape(bucket.count, bucket.width)
        assert bool((real[:, 1:] <= real[:, :-1]).all())  # a segment, then its padding


def test_positions_restart_with_every_segment():
    frequencies = torch.tensor([1.0, 0.1])
    packed = pack_segments([3, 2, 3], frequencies, torch.float32, kernel=False)
    positions = torch.tensor([0.0, 1, 2, 0, 1, 0, 1, 2])
    torch.testing.assert_close(packed.sin[:, 0], (positions[:, None] * frequencies).sin())
    torch.testing.assert_close(packed.cos[:, 0], (positions[:, None] * frequencies).cos())


def test_copies_to_a_gpu_are_pinned_and_not_awaited(monkeypatch):
    calls: list[object] = []

    def copy(tensor, device, **how):
        calls.append(how)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    on_device(torch.zeros(2), torch.device("cuda"))
    assert calls == ["pinned", {"non_blocking": True}]


# ---- Projection, log-probs and entropy in one function, against autograd of the formulas


ROWS, HIDDEN, VOCAB, TEMPERATURE = 9, 6, 24, 0.6


def inputs():
    """hidden, weight, targets, and the gradients of log-probs and entropies."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN) * 2, torch.randn(VOCAB, HIDDEN)
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,)), torch.randn(ROWS), torch.randn(ROWS)


def warmer(mixed):
    """Return one temperature, or one for each row."""
    return torch.linspace(0.5, 1.5, ROWS) if mixed else TEMPERATURE


def naive(*, with_entropy, mixed=False, dtype=torch.float32):
    """log-probs, entropies, gradient of hidden, gradient of weight, in float64 from inputs of ``dtype``."""
    hidden, weight, targets, upstream, upstream_entropy = inputs()
    hidden, weight = (each.to(dtype).double().requires_grad_() for each in (hidden, weight))
    every = (hidden @ weight.t() / torch.as_tensor(warmer(mixed)).view(-1, 1)).log_softmax(-1)
    logprobs, entropy = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    loss = (logprobs * upstream).sum()
    if with_entropy:
        loss = loss + (entropy * upstream_entropy).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return tuple(each.detach().float() for each in (logprobs, entropy, hidden.grad, weight.grad))


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_values_and_gradients_are_those_of_the_formulas(tensor_ranks, dtype):
    """Values are exact to fp32 in either dtype; gradients are rounded to bf16, the one of hidden on each rank."""
    cases = list(itertools.product((0, 4), (False, True), (False, True)))  # rows at a time, entropy bonus, temperatures

    def body(rank, device):
        found = []
        for chunk, with_entropy, mixed in cases:
            hidden, weight, targets, upstream, upstream_entropy = inputs()
            hidden = hidden.to(dtype).requires_grad_()
            shard = weight.to(dtype).chunk(tensor_ranks)[rank].clone().requires_grad_()
            how = Scoring(warmer(mixed), chunk, with_entropy, FORMED[ACTOR].tensor, fp32=True)
            logprobs, entropy, _ = projected_logprobs(hidden, shard, targets, how)
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
        *expected, hidden_grad, weight_grad = naive(with_entropy=with_entropy, mixed=mixed, dtype=dtype)
        error = 1e-5 if dtype is torch.float32 else 2.0**-6
        for rank in ranks:
            for got, wanted in zip(rank[case][:2], expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
            assert rank[case][2].dtype is dtype
            torch.testing.assert_close(rank[case][2].float(), hidden_grad, atol=error, rtol=error)
        got = torch.cat([rank[case][3] for rank in ranks])
        torch.testing.assert_close(got.float(), weight_grad, atol=error, rtol=error)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor_ranks", [1, 2, 3])
def test_several_log_probs_of_a_row_have_exact_gradients(tensor_ranks, dtype):
    """Those of the sampled token and of the teacher's top tokens, which may be more than a shard has; in float64."""
    cases = list(itertools.product((0, 4), (2, 11), (False, True)))  # rows at a time, top tokens, temperatures

    def body(rank, device):
        found = []
        for chunk, k, mixed in cases:
            hidden, weight, targets, *_ = inputs()
            hidden = hidden.to(dtype).requires_grad_()
            shard = weight.to(dtype).chunk(tensor_ranks)[rank].clone().requires_grad_()
            how = Scoring(warmer(mixed), chunk, True, FORMED[ACTOR].tensor, fp32=True)
            teacher = top_tokens(hidden.detach().flip(0), shard.detach(), k, how)
            logprobs, entropy, _ = projected_logprobs(hidden, shard, torch.cat([targets[:, None], teacher], 1), how)
            assert entropy is not None
            ((logprobs * several(k)).sum() + entropy.sum()).backward()
            assert hidden.grad is not None and shard.grad is not None
            found.append((teacher, logprobs.detach(), hidden.grad, shard.grad))
        return found

    ranks = run_ranks(tensor_ranks, body, Config(), ParallelLayout(tensor=tensor_ranks))
    error = 1e-5 if dtype is torch.float32 else 2.0**-6
    for case, (_, k, mixed) in enumerate(cases):
        hidden, weight, targets, *_ = inputs()
        hidden, weight = (each.to(dtype).double().requires_grad_() for each in (hidden, weight))
        teacher = (hidden.flip(0) @ weight.t()).topk(k).indices
        every = (hidden @ weight.t() / torch.as_tensor(warmer(mixed)).view(-1, 1)).log_softmax(-1)
        expected = every.gather(1, torch.cat([targets[:, None], teacher], 1))
        ((expected * several(k)).sum() - (every.exp() * every).sum()).backward()
        for rank in ranks:
            assert torch.equal(rank[case][0], teacher)
            torch.testing.assert_close(rank[case][1], expected.float(), atol=1e-5, rtol=1e-5)
        # rounded as the largest terms of a sum are
        for got, wanted in ((ranks[-1][case][2], hidden.grad), (torch.cat([r[case][3] for r in ranks]), weight.grad)):
            assert wanted is not None
            torch.testing.assert_close(got.float(), wanted.float(), atol=error * wanted.abs().max().item(), rtol=error)


def several(k):
    """The gradients of 1 + k log-probs of each row."""
    return torch.linspace(-1, 1, ROWS * (1 + k)).view(ROWS, 1 + k)


@pytest.mark.processes
def test_padding_of_the_vocabulary_is_no_top_token():
    def body(rank, device):
        hidden, weight, *_ = inputs()
        how = Scoring(group=FORMED[ACTOR].tensor, vocab=VOCAB - 3)
        return top_tokens(hidden, weight.chunk(2)[rank], VOCAB - 4, how)

    hidden, weight, *_ = inputs()
    expected = (hidden @ weight[: VOCAB - 3].t()).topk(VOCAB - 4).indices
    for found in run_ranks(2, body, Config(), ParallelLayout(tensor=2)):
        assert torch.equal(found, expected)


def test_no_rows_give_no_gradient():
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    for chunk in (0, 4):
        logprobs, entropy, _ = projected_logprobs(
            hidden, weight, torch.zeros(0, dtype=torch.int64), Scoring(chunk=chunk, entropy_gradient=True)
        )
        assert entropy is not None and logprobs.shape == entropy.shape == (0,)
        weight.grad = None
        (logprobs.sum() + entropy.sum()).backward()
        assert weight.grad is not None and not weight.grad.any()


def test_certain_token_has_zero_entropy_finite_gradient():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[500.0], [0.0]])  # a probability of exp(-500), which fp32 does not have
    logprobs, entropy, _ = projected_logprobs(hidden, weight, torch.tensor([0]), Scoring(entropy_gradient=True))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == entropy.item() == 0.0
    assert hidden.grad is not None and hidden.grad.item() == 0.0


@pytest.mark.parametrize("chunk", [0, 4])
def test_most_probable_tokens_have_the_highest_log_prob(chunk):
    hidden, weight, targets, *_ = inputs()
    best = (hidden @ weight.t()).argmax(-1)
    targets = torch.where(torch.arange(len(best)) % 2 == 0, best, targets)
    logprobs, _, highest = projected_logprobs(hidden, weight, targets, Scoring(chunk=chunk))
    assert (logprobs >= highest).tolist() == (targets == best).tolist()
    assert 0 < (targets == best).sum() < len(best)


def test_bfloat16_logits_give_fp32_log_probs():
    hidden, weight, targets, upstream, _ = inputs()
    low, low_weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    logprobs, entropy, _ = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, 4))
    assert entropy is not None and logprobs.dtype is entropy.dtype is torch.float32
    (logprobs * upstream).sum().backward()
    assert low.grad is not None and low.grad.dtype is torch.bfloat16
    expected = naive(with_entropy=False)
    torch.testing.assert_close(logprobs.detach(), expected[0], atol=0.2, rtol=0.03)
    torch.testing.assert_close(low_weight.grad.float(), expected[3], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("chunk", [0, 4])
def test_fp32_head_does_not_round_the_logits(chunk):
    hidden, weight, targets, upstream, _ = inputs()
    low, low_weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    every = (low.detach().float() @ low_weight.detach().float().t() / TEMPERATURE).log_softmax(-1)
    expected = every.gather(1, targets[:, None])[:, 0]
    rounded, *_ = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, chunk))
    logprobs, *_ = projected_logprobs(low, low_weight, targets, Scoring(TEMPERATURE, chunk, fp32=True))
    assert (rounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    (logprobs * upstream).sum().backward()
    assert low_weight.grad is not None and low_weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(low_weight.grad.float(), naive(with_entropy=False)[3], atol=0.1, rtol=0.05)


class Operations(TorchDispatchMode):
    """The operations whose result is as large as all logits."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (ROWS, VOCAB):
            self.names.append(func.overloadpacket.__name__)
        return out


def test_inference_makes_no_softmax_and_no_entropy():
    hidden, weight, targets, *_ = inputs()
    weight.requires_grad_()  # a trained head, which has a gradient in no call of inference
    with Operations() as seen, torch.no_grad():
        logprobs, entropy, _ = projected_logprobs(hidden, weight, targets, Scoring(entropy=False))
    assert entropy is None
    assert seen.names == ["mm", "div_", "sub_", "exp"]
    torch.testing.assert_close(logprobs, projected_logprobs(hidden, weight, targets, Scoring())[0].detach())


@pytest.mark.parametrize("chunk", [0, 4])
def test_no_logits_are_kept_for_the_backward_pass(chunk):
    hidden, weight, targets, *_ = inputs()
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
        projected_logprobs(hidden.requires_grad_(), weight, targets, Scoring(chunk=chunk, entropy_gradient=True))
    assert sorted(kept) == [*[(ROWS,)] * 3, (ROWS, 1), (ROWS, HIDDEN), (VOCAB, HIDDEN)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_added_up_in_megatrons_buffer(tied, dtype):
    """In fp32 over micro-batches. Of a weight that is also the embedding, its hook still adds the other part."""
    hidden, weight, targets, upstream, _ = inputs()
    hidden, weight = hidden.to(dtype), weight.to(dtype).requires_grad_()
    buffer = torch.ones(VOCAB, HIDDEN)
    for name, value in {"main_grad": buffer, "grad_added_to_main_grad": False, "zero_out_wgrad": tied}.items():
        setattr(weight, name, value)
    for _ in range(2):
        logprobs, *_ = projected_logprobs(hidden, weight, targets, Scoring(TEMPERATURE, 4, fp32=True))
        (logprobs * upstream).sum().backward()
    # Megatron's hook wants a gradient to be there, and adds it unless it is marked.
    assert (weight.grad is None) is tied and weight.grad_added_to_main_grad is not tied
    error = 1e-5 if dtype is torch.float32 else 2.0**-6
    expected = 1 + 2 * naive(with_entropy=False, dtype=dtype)[3]
    torch.testing.assert_close(buffer, expected, atol=error, rtol=error)


def test_only_one_logits_chunk_exists_at_once():
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
        logprobs, *_ = projected_logprobs(hidden, weight, targets, Scoring(chunk=4))
        (logprobs * upstream).sum().backward()
    assert seen.elements == 4 * VOCAB

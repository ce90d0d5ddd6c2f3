"""Packing of sequences into micro-batches, and attention buckets: no process group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.train.megatron.layers import make_buckets, pack_segments
from realsys.train.worker.data_manager import DataManager
from realsys.train.worker.packing import MicroBatchPacker, last_rows, loss_and_end_rows, on_device, split_rows
from realsys.types import SequenceRef
from tests.support.training.sample_records import make_mask, make_ref


def make_packer(data: DataManager, multiple: int = 1, *, first: bool = True, last: bool = True) -> MicroBatchPacker:
    return MicroBatchPacker(data, torch.device("cpu"), multiple=multiple, first=first, last=last)


def filled() -> tuple[DataManager, list[SequenceRef]]:
    data = DataManager(0)
    data.put("a", {"tokens": np.array([1, 2, 3]), "loss_mask": make_mask(3, 2), "behav_logprobs": np.array([-0.1])})
    data.put("b", {"tokens": np.array([4, 5, 6, 7, 8]), "loss_mask": make_mask(5, 2)})
    data.put("b", {"behav_logprobs": np.array([-0.2, -0.3, -0.4])})
    return data, [make_ref("a", 3, 2), make_ref("b", 5, 2)]


def test_rows_point_one_before_the_answer_tokens() -> None:
    data, refs = filled()
    batch = make_packer(data, 4).pack(refs, ["behav_logprobs"])
    assert batch.tokens is not None and batch.targets is not None
    assert batch.tokens.tolist() == [4, 5, 6, 7, 8, 1, 2, 3]  # longest first
    assert batch.lengths == [5, 3]
    assert batch.rows.tolist() == [1, 2, 3, 6]
    assert batch.targets.tolist() == [6, 7, 8, 3]
    assert batch.tokens[batch.rows + 1].tolist() == batch.targets.tolist()
    assert batch.arrays["behav_logprobs"].tolist() == pytest.approx([-0.2, -0.3, -0.4, -0.1])


def test_multi_turn_rows_point_before_loss_tokens() -> None:
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


def test_rows_that_begin_alike_are_packed_once() -> None:
    """Two are equal, and nothing is left of one of them."""
    data, refs = DataManager(0), []
    rows = [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 8, 9]]
    for k, (row, shared) in enumerate(zip(rows, shared_beginnings([np.array(row) for row in rows]), strict=True)):
        data.put(f"{k}", {"tokens": np.array(row), "loss_mask": make_mask(len(row), 3)})
        refs.append(replace(make_ref(f"{k}", len(row), 3), shared=shared))
    batch = make_packer(data, 4).pack(refs)
    assert batch.tokens is not None and batch.targets is not None
    assert batch.tokens.tolist() == [4, 5, 6, 8, 9, 7, 0, 0] and batch.lengths == [3, 2, 1, 2]
    assert batch.parents == [(), (0,), (0,), ()]
    assert batch.rows.tolist() == [2, 3, 2, 2] and batch.targets.tolist() == [8, 9, 7, 7]
    assert last_rows(batch).tolist() == [4, 5, 5]
    equal = make_packer(data).pack(refs[:2])
    assert equal.tokens is not None and equal.tokens.tolist() == [4, 5, 6, 7] and equal.lengths == [4]
    assert equal.rows.tolist() == [2, 2] and equal.parents == [()] and loss_and_end_rows(equal).tolist() == [2, 3, 2, 3]


def test_mask_must_match_the_plan() -> None:
    data = DataManager(0)
    data.put("s", {"tokens": np.arange(4), "loss_mask": make_mask(4, 2)})
    with pytest.raises(AssertionError, match=r"loss tokens per sequence: \[2\] here, \[3\] in the plan"):
        make_packer(data).pack([make_ref("s", 4, 1)])
    data.put("s", {"loss_mask": make_mask(4, 0)})
    with pytest.raises(AssertionError, match="the first token of a sequence is in the loss"):
        make_packer(data).pack([make_ref("s", 4, 0)])


def test_padding_is_own_segment_without_rows() -> None:
    data, refs = filled()
    batch = make_packer(data, 6).pack(refs)
    assert batch.lengths == [5, 3, 4]
    assert batch.tokens is not None and batch.tokens.tolist()[8:] == [0] * 4
    assert int(batch.rows.max()) < 8


def test_an_empty_micro_batch_is_one_masked_segment() -> None:
    batch = make_packer(DataManager(0), 2).pack([], ["behav_logprobs"])
    assert batch.lengths == [2]
    assert batch.tokens is not None and len(batch.tokens) == 2
    assert len(batch.rows) == 0
    assert batch.targets is not None and len(batch.targets) == 0
    assert len(batch.arrays["behav_logprobs"]) == 0


def test_a_stage_between_needs_no_arrays() -> None:
    batch = make_packer(DataManager(0), first=False, last=False).pack([make_ref("elsewhere", 5, 2)], ["behav_logprobs"])
    assert batch.tokens is None and batch.targets is None and not batch.arrays
    assert sum(batch.lengths) == 5


def test_answers_go_back_to_their_samples() -> None:
    data, refs = filled()
    batch = make_packer(data).pack(refs)
    parts = split_rows(batch, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert {name: part.tolist() for name, part in parts.items()} == {"b": [1.0, 2.0, 3.0], "a": [4.0]}


def test_values_per_sequence_are_spread_over_answer_tokens() -> None:
    data, refs = filled()
    packer = make_packer(data)
    assert packer.per_loss_token(packer.pack(refs), [0.5, -2.0]).tolist() == [0.5, 0.5, 0.5, -2.0]


def test_buckets_cover_tokens_once_and_pad_behind() -> None:
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


def test_positions_restart_with_every_segment() -> None:
    frequencies = torch.tensor([1.0, 0.1])
    packed = pack_segments([3, 2, 3], frequencies, torch.float32, kernel=False)
    assert packed.cos is not None and packed.sin is not None
    positions = torch.tensor([0.0, 1, 2, 0, 1, 0, 1, 2])
    torch.testing.assert_close(packed.sin[:, 0], (positions[:, None] * frequencies).sin())
    torch.testing.assert_close(packed.cos[:, 0], (positions[:, None] * frequencies).cos())


def test_copies_to_a_gpu_are_pinned_and_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def copy(tensor: torch.Tensor, device: torch.device, **how: object) -> torch.Tensor:
        calls.append(how)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    on_device(torch.zeros(2), torch.device("cuda"))
    assert calls == ["pinned", {"non_blocking": True}]

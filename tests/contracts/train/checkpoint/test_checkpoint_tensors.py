"""Parts of tensors: boxes by hand, and any part read back from parts that were cut differently."""

import itertools
import random

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from realsys.config.allocation import ParallelLayout
from realsys.errors import CheckpointError
from realsys.train.checkpoint.checkpoint_files import RankIndex
from realsys.train.checkpoint.tensors import (
    PieceReader,
    TensorBox,
    snapshot,
    split_shard,
    whole_shard,
    write_tensors,
)

WHOLE = torch.arange(8 * 6, dtype=torch.float32).view(8, 6)


def local(shard):
    """The shard of WHOLE, by plain indexing."""
    parts = [WHOLE[b.offset[0] : b.offset[0] + b.shape[0], b.offset[1] : b.offset[1] + b.shape[1]] for b in shard.boxes]
    return torch.cat(parts)


def reader(tmp_path, shards):
    """One file per rank."""
    layout = ParallelLayout(data=len(shards))
    indexes = []
    for rank, snapshots in enumerate(shards):
        path = tmp_path / f"actor-{rank + 1:05d}-of-{len(shards):05d}.safetensors"
        info, pieces = write_tensors(path, snapshots)
        indexes.append(RankIndex("actor", 1, layout, rank, {}, None, {}, info, pieces))
    return PieceReader(tmp_path, indexes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "load"},
        {"shape": (8,)},
        {"offset": (1, 0)},
        {"start": -1},
        {"stop": 49},
        {"size": 4},
        {"position": 1 << 40},
        {"stop": 1 << 40, "size": 1 << 42},
    ],
)
def test_impossible_index_is_refused(tmp_path, wrong):
    """Its checksum may be right all the same: a defect, or a hand that edited it."""
    path = tmp_path / "actor-00001-of-00001.safetensors"
    info, pieces = write_tensors(path, list(snapshot("param", whole_shard("w", (8, 6)), WHOLE.flatten())))
    (piece,) = pieces
    spoilt = [msgspec.structs.replace(piece, **wrong)]
    index = RankIndex("actor", 1, ParallelLayout(), 0, {}, None, {}, info, spoilt)
    with pytest.raises(CheckpointError, match="its index lists a piece that it cannot have"):
        PieceReader(tmp_path, [index])


def test_shards_by_hand():
    assert split_shard("w", (4, 6), 0, 1, 2).boxes == (TensorBox((4, 0), (4, 6)),)
    assert split_shard("w", (8, 3), 1, 1, 2).boxes == (TensorBox((0, 3), (8, 3)),)
    # Gate is rows 0-3, up rows 4-7; tensor rank 1 holds the second half of each.
    gate_up = split_shard("w", (4, 6), 0, 1, 2, stacked=2)
    assert gate_up.whole == (8, 6) and gate_up.boxes == (TensorBox((2, 0), (2, 6)), TensorBox((6, 0), (2, 6)))
    # Elements 10 to 15 of the shard: the last two of gate, the first three of up.
    assert list(gate_up.ranges(10, 15)) == [(gate_up.boxes[0], 10, 12), (gate_up.boxes[1], 0, 3)]
    assert split_shard("w", (8, 6), 0, 0, 1, stacked=2) == whole_shard("w", (8, 6))


@pytest.mark.parametrize("seed", range(20))
def test_any_part_is_read_from_other_parts(tmp_path, seed):
    rng = random.Random(seed)

    def cut():
        kind = rng.choice(["whole", "rows", "columns", "stacked"])
        ranks = 1 if kind == "whole" else 2
        shape, dim = ((8, 3), 1) if kind == "columns" else ((8 // ranks, 6), 0)
        return [split_shard("w", shape, dim, rank, ranks, 2 if kind == "stacked" else 1) for rank in range(ranks)]

    files = []
    for shard in cut():  # each rank's shard, cut again into ranges as the distributed optimizer does
        flat = local(shard).flatten()
        bounds = [0, *sorted(rng.sample(range(1, flat.numel()), 2)), flat.numel()]
        files += [list(snapshot("param", shard, flat[a:b], a)) for a, b in itertools.pairwise(bounds)]
    with reader(tmp_path, files) as found:
        assert found.kinds("w") == {"param": (8, 6)} and found.kinds("v") == {}
        for shard in cut():
            start, stop = sorted(rng.sample(range(shard.numel + 1), 2))
            assert torch.equal(found.read("param", shard), local(shard).flatten())
            assert torch.equal(found.read("param", shard, start, stop), local(shard).flatten()[start:stop])


def test_unwritten_part_is_an_error(tmp_path):
    shard = whole_shard("w", (8, 6))
    with (
        reader(tmp_path, [list(snapshot("param", shard, WHOLE.flatten()[:40]))]) as found,
        pytest.raises(CheckpointError, match=r"w \(param\) is not complete: only 40 of 48 elements"),
    ):
        found.read("param", shard)
    upper = split_shard("w", (4, 6), 0, 0, 2)
    with (
        reader(tmp_path, [list(snapshot("param", upper, local(upper).flatten()))]) as found,
        pytest.raises(CheckpointError, match=r"w \(param\) is not complete: only 24 of 48 elements"),
    ):
        found.read("param", shard)


def test_other_tools_can_read_the_files(tmp_path):
    low = WHOLE.to(torch.bfloat16).flatten()
    snapshots = [
        *snapshot("param", whole_shard("w", (8, 6)), WHOLE.flatten()),
        *snapshot("exp_avg", whole_shard("w", (8, 6)), low),
    ]
    info, _ = write_tensors(tmp_path / "f.safetensors", snapshots)
    assert info.size == (tmp_path / "f.safetensors").stat().st_size
    tensors = load_file(tmp_path / "f.safetensors")
    assert tensors.keys() == {"0/param/w", "1/exp_avg/w"}
    assert torch.equal(tensors["0/param/w"], WHOLE.flatten()) and torch.equal(tensors["1/exp_avg/w"], low)

"""Splits of the world into process groups, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import form_meshes, splits

LARGE = [
    ParallelLayout(data=128, tensor=4),
    ParallelLayout(data=64, pipeline=2, tensor=4),
    ParallelLayout(data=16, pipeline=4, tensor=8),
]


@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_mesh_of_512_ranks_needs_few_splits(layout: ParallelLayout) -> None:
    """One operation for each group would be 645 to 971."""
    made = splits([whole_mesh(layout)], 512)
    assert len(made) <= 8
    for split in made:
        assert sorted(worker for group in split for worker in group) == list(range(512))
    assert made[0] == [(worker,) for worker in range(512)], "the groups of one member are made together"
    assert sum(all(len(group) == 1 for group in split) for split in made) == 1


def test_equal_splits_of_two_meshes_are_made_once() -> None:
    actor, critic = whole_mesh(ParallelLayout(data=2, tensor=2)), whole_mesh(ParallelLayout(data=4))
    alone = [(0,), (1,), (2,), (3,)]
    assert splits([actor, critic, actor], 4) == [alone, [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


def test_one_worker_needs_no_split() -> None:
    assert splits([whole_mesh(ParallelLayout())], 1) == []


def test_meshes_on_separate_workers_share_splits() -> None:
    layout = ParallelLayout(data=2, tensor=2)
    made = splits([Mesh(layout, (0, 1, 2, 3)), Mesh(layout, (4, 5, 6, 7))], 8)
    assert made[1:] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 2), (1, 3), (4, 6), (5, 7)],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
    ]


def test_workers_outside_a_mesh_are_alone_in_its_splits() -> None:
    """Else they would have made fewer groups than others, and torch would name their next group differently."""
    made = splits([Mesh(ParallelLayout(pipeline=3), (1, 2, 3))], 5)
    assert made[1:] == [[(0,), (1, 2, 3), (4,)], [(0,), (1, 3), (2,), (4,)]]


def test_nccl_splits_the_world_once_for_each_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[list[int]]] = []

    def split_group(split_ranks: list[list[int]], timeout: Any) -> Any:
        made.append(split_ranks)
        return next(group for group in map(tuple, split_ranks) if 37 in group)

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    mesh = whole_mesh(LARGE[2])
    device = Device(torch.device("cuda", 0), "nccl")
    formed: Any = form_meshes({"actor": mesh, "ref": mesh}, 37, Config().cluster, device)["actor"]
    assert made == [[list(group) for group in split] for split in splits([mesh], 512)]
    assert formed.tensor == tuple(range(32, 40)) and formed.pipeline == (37, 165, 293, 421)
    assert formed.data == tuple(range(5, 128, 8))

"""Ranks, heads and the routing table."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.cluster.topology import (
    Mesh,
    ModelShardID,
    group_contiguously,
    inference_rank,
    routing_table,
    whole_mesh,
)
from realsys.config.allocation import ParallelLayout

layouts = st.builds(ParallelLayout, data=st.integers(1, 5), pipeline=st.integers(1, 4), tensor=st.integers(1, 4))


def test_routing_of_two_by_two_by_two():
    table = routing_table({"actor": whole_mesh(ParallelLayout(data=2, pipeline=2, tensor=2))})
    assert table[str(ModelShardID("actor", dp=0, tp=0, pp=1))] == 4
    assert table[str(ModelShardID("actor", dp=1, tp=0, pp=1))] == 6
    assert (table["__data0__"], table["__data1__"], table["actor/__data1__"]) == (4, 6, 6)
    assert [table[str(i)] for i in range(8)] == list(range(8))


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout):
    mesh = whole_mesh(layout)
    seen = {mesh.rank(*mesh.coordinates(rank)) for rank in range(layout.world_size)}
    assert seen == set(range(layout.world_size))


@given(layouts)
def test_every_worker_is_in_one_dp_rank_and_its_head_too(layout):
    mesh = whole_mesh(layout)
    members = [mesh.dp_members(dp) for dp in range(layout.data)]
    assert sorted(worker for group in members for worker in group) == list(range(layout.world_size))
    assert all(mesh.dp_head(dp) in members[dp] for dp in range(layout.data))


@given(layouts)
def test_inference_ranks_are_one_to_one_and_tensor_is_innermost(layout):
    coordinates = [(d, t, p) for d in range(layout.data) for p in range(layout.pipeline) for t in range(layout.tensor)]
    assert [inference_rank(layout, d, t, p) for d, t, p in coordinates] == list(range(layout.world_size))


def test_roles_that_share_workers_have_their_own_heads_and_no_bare_handle():
    actor = Mesh(ParallelLayout(data=2, pipeline=1, tensor=1), (0, 1))
    critic = Mesh(ParallelLayout(data=2, pipeline=1, tensor=1), (1, 0))
    table = routing_table({"actor": actor, "critic": critic})
    assert (table["actor/__data0__"], table["critic/__data0__"]) == (0, 1) and "__data0__" not in table


@pytest.mark.parametrize("workers", [(0,), (0, 0), (0, 1, 2)])
def test_mesh_needs_as_many_distinct_workers_as_the_layout(workers):
    with pytest.raises(ValueError, match="2 distinct workers"):
        Mesh(ParallelLayout(data=2, pipeline=1, tensor=1), workers)


@given(st.integers(1, 40), st.integers(1, 12))
def test_grouping_is_contiguous_balanced_and_leaves_nobody_out(senders, receivers):
    groups = group_contiguously(senders, receivers)
    assert len(groups) == senders
    flat = [receiver for group in groups for receiver in group]
    assert flat == sorted(flat) and set(flat) == set(range(receivers))
    loads = [flat.count(r) for r in range(receivers)] if senders >= receivers else [len(g) for g in groups]
    assert max(loads) - min(loads) <= 1 and loads == sorted(loads, reverse=True)


def test_cluster_package_is_light():
    """Every process imports it first: no torch, no grpc, no pydantic, no numpy."""
    code = (
        "import sys, realsys.cluster.worker, realsys.cluster.name_store, realsys.cluster.file_store, "
        "realsys.cluster.heartbeat, realsys.cluster.network, realsys.cluster.names\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'grpc', 'pydantic', 'numpy', 'etcd3', 'zmq'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "set()", done.stderr

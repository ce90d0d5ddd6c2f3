"""Ranks, heads and the routing table."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realsys.cluster.topology import Mesh, group_contiguously, place, receivers_of, routing_table, whole_mesh
from realsys.config.allocation import ParallelLayout, parse_allocation

layouts = st.builds(ParallelLayout, data=st.integers(1, 5), pipeline=st.integers(1, 4), tensor=st.integers(1, 4))


def table_of(allocation, *roles):
    return routing_table(place(parse_allocation(f"sglang.d1+{allocation}"), roles))


def plain(workers):
    return {str(worker): worker for worker in range(workers)}


def test_routing_of_data_tensor_and_pipeline_parallelism():
    assert table_of("d2p2m2", "actor") == plain(8) | {
        "actor@d0t0p0": 0,
        "actor@d0t1p0": 1,
        "actor@d1t0p0": 2,
        "actor@d1t1p0": 3,
        "actor@d0t0p1": 4,
        "actor@d0t1p1": 5,
        "actor@d1t0p1": 6,
        "actor@d1t1p1": 7,
        "actor/__data0__": 4,  # the last stage speaks for a data rank
        "actor/__data1__": 6,
        "__data0__": 4,
        "__data1__": 6,
    }


def test_routing_of_actor_and_critic_on_shared_workers():
    """Workers 0 and 1 hold a shard of each; no bare handle says whose data rank is meant."""
    assert table_of("actor.d2p2,critic.m2", "actor", "critic") == plain(4) | {
        "actor@d0t0p0": 0,
        "actor@d1t0p0": 1,
        "actor@d0t0p1": 2,
        "actor@d1t0p1": 3,
        "actor/__data0__": 2,
        "actor/__data1__": 3,
        "critic@d0t0p0": 0,
        "critic@d0t1p0": 1,
        "critic/__data0__": 0,
    }


def test_roles_on_separate_workers_are_routed():
    """The reference, which the expression does not name, is where the actor is."""
    assert table_of("actor.d2+critic.p2m2", "ref", "actor", "critic") == plain(6) | {
        "actor@d0t0p0": 0,
        "actor@d1t0p0": 1,
        "actor/__data0__": 0,
        "actor/__data1__": 1,
        "ref@d0t0p0": 0,
        "ref@d1t0p0": 1,
        "ref/__data0__": 0,
        "ref/__data1__": 1,
        "critic@d0t0p0": 2,
        "critic@d0t1p0": 3,
        "critic@d0t0p1": 4,
        "critic@d0t1p1": 5,
        "critic/__data0__": 4,
    }


def test_two_roles_share_workers_without_the_actor():
    meshes = place(parse_allocation("critic.m2,ref.d2+actor.d1+sglang.d2"), ["actor", "critic", "ref", "reward"])
    assert {role: mesh.workers for role, mesh in meshes.items()} == {
        "critic": (0, 1),
        "ref": (0, 1),
        "actor": (2,),
        "reward": (2,),
    }
    assert meshes["critic"] != meshes["ref"] and meshes["reward"] == meshes["actor"]
    assert meshes["critic"].dp_members(0) == [0, 1]
    assert [meshes["ref"].dp_members(dp) for dp in (0, 1)] == [[0], [1]]


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout):
    mesh = whole_mesh(layout)
    seen = {mesh.rank(*mesh.coordinates(rank)) for rank in range(layout.world_size)}
    assert seen == set(range(layout.world_size))


@given(layouts)
def test_worker_is_in_exactly_one_dp_rank(layout):
    """The head of a DP rank is one of its members."""
    mesh = whole_mesh(layout)
    members = [mesh.dp_members(dp) for dp in range(layout.data)]
    assert sorted(worker for group in members for worker in group) == list(range(layout.world_size))
    assert all(mesh.dp_head(dp) in members[dp] for dp in range(layout.data))


@pytest.mark.parametrize("workers", [(0,), (0, 0), (0, 1, 2)])
def test_mesh_needs_distinct_workers(workers):
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


@pytest.mark.processes
def test_cluster_package_is_light():
    """Every process imports it first: no torch, no grpc, no pydantic, no numpy."""
    code = (
        "import sys, realsys.cluster.worker, realsys.cluster.names.contract, realsys.cluster.names.file_store, "
        "realsys.cluster.lease, realsys.cluster.network, realsys.cluster.names.contract\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'grpc', 'pydantic', 'numpy', 'etcd3', 'zmq'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr


def test_sender_beyond_the_configured_number_has_receivers():
    assert [receivers_of(sender, 2, 4) for sender in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]

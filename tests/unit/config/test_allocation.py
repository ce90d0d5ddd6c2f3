"""The allocation expression and where it puts each role, against placements worked out by hand."""

import pytest

from realsys.cluster.topology import place
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.errors import ConfigError

PLACEMENTS = [
    # (expression, ModelWorkers, role -> workers in rank order)
    ("serve.d4p1m1+d2p2m1", 4, {"actor": (0, 1, 2, 3), "ref": (0, 1, 2, 3)}),
    ("d2+serve.d4", 2, {"actor": (0, 1), "critic": (0, 1)}),
    ("d1p1m2", 2, {"actor": (0, 1)}),
    ("actor.d2,ref.m2+critic.d1", 3, {"actor": (0, 1), "ref": (0, 1), "critic": (2,)}),
    ("sglang.d2+actor.d2p2,critic.m2", 4, {"actor": (0, 1, 2, 3), "critic": (0, 1), "ref": (0, 1, 2, 3)}),
    ("sglang.d2+actor.d2+critic.d1m2,ref.d1", 4, {"actor": (0, 1), "critic": (2, 3), "ref": (2,)}),
    ("serve.d2|actor.d2p2|critic.m2", 4, {"actor": (0, 1, 2, 3), "critic": (0, 1)}),
    ("ref.d1+serve.d2+serve.d1|d2", 3, {"actor": (1, 2), "ref": (0,)}),
    ("sglang.d1+critic.d1+actor.d1p2+reward.d1", 4, {"critic": (0,), "actor": (1, 2), "reward": (3,), "ref": (1, 2)}),
]


@pytest.mark.parametrize(("text", "workers", "roles"), PLACEMENTS, ids=[text for text, *_ in PLACEMENTS])
def test_roles_sit_where_the_expression_says(text, workers, roles):
    allocation = parse_allocation(text)
    assert allocation.workers == workers
    assert {role: mesh.workers for role, mesh in place(allocation, roles).items()} == roles


@pytest.mark.parametrize(
    ("text", "servers", "lent", "first"),
    [
        ("serve.d2+d2", 2, 0, 0),
        ("serve.d2|d2p2", 2, 2, 0),
        ("d2|serve.d1", 1, 1, 0),
        ("d2", 0, 0, 0),
        ("ref.d1+serve.d2+serve.d1m1|d2", 3, 1, 1),
    ],
)
def test_servers_that_share_devices_come_last(text, servers, lent, first):
    allocation = parse_allocation(text)
    assert (allocation.inference.data, allocation.lent, allocation.lent_from) == (servers, lent, first)
    assert [allocation.is_lent(server) for server in range(servers)] == [False] * (servers - lent) + [True] * lent


@pytest.mark.parametrize("name", ["embedded", "sglang"])
def test_name_of_a_builtin_backend_means_serve(name):
    """The engine is chosen by ``generation.backend``; older configurations say ``sglang.`` whichever it is."""
    assert parse_allocation(f"{name}.d3m2+d2,ref.d1") == parse_allocation("serve.d3m2+d2,ref.d1")


def test_comma_shares_workers_between_layouts():
    """Each role keeps its layout on the shared workers."""
    allocation = parse_allocation("sglang.d3+actor.d2p2,critic.m2")
    assert allocation.inference == ParallelLayout(data=3)
    assert allocation.actor == ParallelLayout(data=2, pipeline=2)
    assert allocation.placement("critic").layout == ParallelLayout(tensor=2)
    assert allocation.placement("reward") == allocation.placement("actor")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sglang.d1+sglang.d1+d1", "exactly one inference part"),
        ("serve.d1+sglang.d1+d1", "exactly one inference part"),
        ("sglang.d1+critic.d1", "the actor has no part"),
        ("sglang.d1+d1+d1", "'actor' is given twice"),
        ("sglang.d1+actor.d1,critic.x2", "cannot read 'x2'"),
        ("sglang.d1+d1d2", "axis 'd' is given twice"),
        ("sglang.d1+d0", "at least 1"),
        ("sglang.d1+d1,critic.", "cannot read"),
        ("sglang.d1+2x.d1", "cannot read the role"),
        ("sglang.p2+d1", "must have p1"),
        ("", "cannot read"),
        ("serve.d1|d1+serve.d1,ref.d1", "exactly one inference part"),
        ("serve.d1m2+serve.d1|d1", "the same m"),
        ("serve.d1m2|d1", "has servers on 2 devices of workers, and 'serve.d1m2|d1' has 1"),
    ],
)
def test_what_cannot_be_read_is_named(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse_allocation(text)
    assert problem in str(caught.value) and caught.value.value == text


def test_role_without_a_call_is_refused():
    """The allocation may name only roles that the dataflow calls."""
    allocation = parse_allocation("sglang.d1+d1+judge.d1")
    allocation.check_roles(["actor", "judge"], "")
    with pytest.raises(ConfigError, match="judge.*calls actor, ref"):
        allocation.check_roles(["actor", "ref"], "sglang.d1+d1+judge.d1")

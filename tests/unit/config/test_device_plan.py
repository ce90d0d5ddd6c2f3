"""Device plans: golden files with recorded output, and the rules of the plan for drawn nodes.

A line of a file is a plan: nodes as COUNTxGPUS, the allocation, settings. Its output is indented below it, and
``REALSYS_REWRITE=1`` records it anew.
"""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realsys.config.allocation import parse_allocation
from realsys.config.device_plan import (
    RANK,
    SERVER,
    Block,
    as_lines,
    nodes_of,
    owners,
    place,
    seats_of,
    tensor_groups,
)
from realsys.config.machine import Machine, NodeDevices
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed

GIB = 1 << 30
MACHINE = Machine(cpus=8, memory_bytes=64 * GIB)
PLANS = sorted(Path(__file__).with_name("device_plans").glob("*.txt"))


def nodes_from(text):
    """Read `COUNTxGPUS,...`; with 0l GPUs the nodes are light."""
    sizes = [size for part in text.split(",") for count, size in [part.split("x")] for _ in range(int(count))]
    return [
        NodeDevices(f"node{n}", 16, 256 * GIB, int(size.rstrip("l")), light="l" in size) for n, size in enumerate(sizes)
    ]


def planned(line):
    """Return the plan of a line, or its refusal."""
    nodes, allocation, *overrides = line.split()
    there = nodes_from(nodes)
    machine = Machine(16, 256 * GIB, tuple("g" * max(node.gpus for node in there)), torch_has_cuda=True)
    try:
        config = changed(f"allocation={allocation}", *overrides)
        return as_lines(there, seats_of(config, machine, there))
    except ConfigError as error:
        assert error.exit_code == 2 and "\n" not in str(error)
        return [f"refused: {error}"]


@pytest.mark.parametrize("script", PLANS, ids=lambda script: script.stem)
def test_plan_has_its_recorded_output(script):
    played: list[str] = []
    for line in script.read_text().splitlines():
        if not line.startswith("    "):
            played.append(line)
            if line and not line.startswith("#"):
                played += [f"    {output}" for output in planned(line)]
    text = "\n".join(played) + "\n"
    if os.environ.get("REALSYS_REWRITE") == "1":
        script.write_text(text)
    assert script.read_text() == text


def blocks(groups, servers):
    """Return tensor-parallel groups of these sizes, and servers of these (GPUs per stage, stages)."""
    first = [sum(groups[:number]) for number in range(len(groups))]
    ranks = [Block(RANK, range(at, at + size), 1, 1, 0) for at, size in zip(first, groups, strict=True)]
    many = enumerate(servers)
    return ranks + [Block(SERVER, range(n, n + 1), width * stages, 1, 0, stages) for n, (width, stages) in many]


def is_run(gpus):
    return list(gpus) == list(range(gpus[0], gpus[0] + len(gpus)))


def check_seats(seats, wanted, nodes):
    """Assert whole-group, all-placed and one-rank of a plan."""
    sizes = {node.name: node.gpus for node in nodes}
    assert all(0 <= gpu < sizes[seat.node] for seat in seats for gpu in seat.gpus)
    for block in wanted:
        own = [seat for seat in seats if seat.kind == block.kind and seat.index in block.indexes]
        assert sum(len(seat.gpus) for seat in own) == block.gpus * len(block.indexes)
        assert all(is_run(seat.gpus) for seat in own)
        if block.kind == RANK:
            assert len({seat.node for seat in own}) == 1
            assert is_run([gpu for seat in own for gpu in seat.gpus])
        else:
            assert [seat.node_rank for seat in own] == list(range(len(own)))
            assert len({seat.node for seat in own}) == own[0].nodes == len(own)
            assert block.parts % len(own) == 0 and len({len(seat.gpus) for seat in own}) == 1
    assert max(owners([seat for seat in seats if seat.kind == RANK]).values(), default=0) <= 1


@settings(max_examples=200, deadline=None)
@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    groups=st.lists(st.integers(1, 8), max_size=5),
    servers=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), max_size=5),
    share=st.booleans(),
)
def test_every_plan_obeys_the_rules(gpus, groups, servers, share):
    nodes = [NodeDevices(f"n{number}", 64, 0, size) for number, size in enumerate(gpus)]
    wanted = blocks(groups, servers)
    try:
        seats = place(nodes, wanted, "serve.d1+d1", share=share)
    except ConfigError as error:
        assert any(char.isdigit() for char in str(error)) and "\n" not in str(error)
        return
    check_seats(seats, wanted, nodes)
    assert share or max(owners(seats).values(), default=0) <= 1


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("serve.d1+d2", ["0", "1"]),
        ("serve.d1+d2p2m2", ["01", "23", "45", "67"]),
        ("serve.d1+d4,critic.m2", ["01", "2", "3"]),
        ("serve.d1+d2m2,critic.m4", ["0123"]),
        ("serve.d1+d1m2+critic.m3", ["01", "234"]),
    ],
)
def test_overlapping_groups_of_roles_stay_together(text, groups):
    found = tensor_groups(parse_allocation(text), ["actor", "critic"])
    assert ["".join(map(str, group)) for group in found] == groups


def test_node_that_is_listed_twice_is_refused():
    node = NodeDevices("a", 8, 0, 8)
    with pytest.raises(ConfigError, match="cluster.nodes=2: node a is listed twice"):
        place([node, node], blocks([1], []), "serve.d1+d1")


def test_node_without_memory_for_processes_is_refused():
    block = Block(RANK, range(2), 0, 1, 3 * GIB)
    with pytest.raises(ConfigError, match=r"need about 6\.0 GiB, 5\.0 GiB are free on a"):
        place([NodeDevices("a", 8, 5 * GIB, 0)], [block], "serve.d1+d2")


def test_workers_on_many_nodes_have_more_time_to_start():
    one, many = (ClusterConfig(connect_timeout_s=100, nodes=nodes) for nodes in (0, 64))
    assert (one.start_timeout_s, many.start_timeout_s) == (100, 612)


def test_nodes_are_those_of_the_configuration():
    sizes = ["cluster.gpus_per_node=8", "cluster.cpus_per_node=96", "cluster.memory_gb_per_node=1000"]
    assert nodes_of(changed("cluster.nodes=2", *sizes), MACHINE) == [
        NodeDevices("node0", 96, 1000 * GIB, 8),
        NodeDevices("node1", 96, 1000 * GIB, 8),
    ]
    light = ["cluster.cpu_nodes=1", "cluster.cpus_per_cpu_node=64", "cluster.memory_gb_per_cpu_node=500"]
    assert nodes_of(changed("cluster.nodes=2", *sizes, *light), MACHINE) == [
        NodeDevices("node0", 64, 500 * GIB, 0, light=True),
        NodeDevices("node1", 96, 1000 * GIB, 8),
    ]
    [here] = nodes_of(changed(), MACHINE)
    assert (here.name, here.cpus, here.memory, here.gpus) == ("this machine", 8, 64 * GIB, 0)


def test_light_nodes_leave_room_for_others():
    with pytest.raises(ConfigError, match="cluster.cpu_nodes=2: are among the nodes.* cluster.nodes is 2"):
        nodes_of(changed("cluster.nodes=2", "cluster.cpu_nodes=2"), MACHINE)

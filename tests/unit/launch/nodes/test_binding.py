"""Which machine gets which node: joins, losses, spares, machines that do not suit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from realsys.config.device_plan import Needs
from realsys.config.machine import NodeDevices
from realsys.launch.nodes.coordinator import Binding

_GIB = 1 << 30


@dataclass
class Process:
    gpus: tuple[int, ...] = ()
    memory: int = _GIB


LARGE = Needs.of([Process((0, 1)), Process((7,)), Process()], gpu_memory=79 * _GIB)
SMALL = Needs.of([Process()], gpu_memory=79 * _GIB)


def machine(
    name: str, gpus: int = 8, cpus: int = 16, memory: int = 64 * _GIB, gpu_memory: int = 80 * _GIB
) -> NodeDevices:
    return NodeDevices(name, cpus, memory, gpus, gpu_memory=gpu_memory)


def two_nodes() -> Binding:
    return Binding({"node0": LARGE, "node1": LARGE})


def test_needs_are_the_sum_of_the_processes() -> None:
    assert Needs(processes=3, gpus=8, memory=3 * _GIB, gpu_memory=79 * _GIB) == LARGE
    assert Needs(1, 0, _GIB) == SMALL


def test_machines_get_the_nodes_in_their_order() -> None:
    binding = two_nodes()
    assert [binding.join(machine(name)) for name in ("c", "a", "b")] == ["node0", "node1", ""]
    assert not binding.free and binding.node_of("a") == "node1" and list(binding.spares) == ["b"]


def test_machine_of_the_launcher_gets_the_first_node() -> None:
    """Also if it joins last; once it is lost, another machine may have its node."""
    binding = Binding({"node0": LARGE, "node1": LARGE}, first="c")
    assert [binding.join(machine(name)) for name in ("a", "b", "c")] == ["node1", "", "node0"]
    assert binding.leave("c") == ("node0", "b")


def test_spare_takes_the_node_of_a_lost_machine() -> None:
    binding = two_nodes()
    for name in ("a", "b", "c", "d"):
        binding.join(machine(name))
    assert binding.leave("a") == ("node0", "c")
    assert binding.machine_of == {"node0": "c", "node1": "b"} and list(binding.spares) == ["d"]
    assert binding.leave("d") == ("", "")
    assert binding.leave("b") == ("node1", "") and binding.free == ["node1"]


def test_machine_with_gpus_leaves_light_nodes_free() -> None:
    binding = Binding({"node0": SMALL, "node1": LARGE})
    assert [binding.join(machine("g", gpus=8)), binding.join(machine("c", gpus=0))] == ["node1", "node0"]


def test_lost_machine_gets_its_node_again() -> None:
    binding = two_nodes()
    for name in ("a", "b"):
        binding.join(machine(name))
    binding.leave("a")
    binding.leave("b")
    assert binding.join(machine("b")) == "node1"
    assert binding.join(machine("a")) == "node0"


def test_machine_with_the_name_of_a_node_gets_that_node() -> None:
    binding = two_nodes()
    assert binding.join(machine("node1")) == "node1"
    assert binding.join(machine("a")) == "node0"


def test_machine_gets_a_node_that_it_fits() -> None:
    binding = Binding({"node0": LARGE, "node1": SMALL})
    assert binding.join(machine("cpu", gpus=0)) == "node1"
    assert binding.join(machine("cpu2", gpus=0)) == ""
    assert binding.join(machine("gpu")) == "node0"
    assert binding.leave("gpu") == ("node0", "")


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"gpus": 4}, "its processes need 8 GPUs, 4 are there"),
        ({"memory": 2 * _GIB}, "its processes need about 3.0 GiB, 2.0 GiB are free"),
        ({"gpu_memory": 40 * _GIB}, "its GPUs have 40.0 GiB, and the plan is for cluster.gpu_memory_gb=79"),
    ],
)
def test_misfit_is_named_with_the_numbers(sizes: dict[str, int], problem: str) -> None:
    binding = two_nodes()
    binding.join(machine("a"))
    assert not binding.misfit(machine("b"))
    assert binding.misfit(machine("b", **sizes)) == f"b cannot be node1: {problem}"
    assert binding.misfit(machine("node0", **sizes)) == f"node0 cannot be node0: {problem}"


def test_gpu_must_hold_a_training_rank() -> None:
    needs = replace(Needs.of([Process((0,))]), rank_gpu=52 * _GIB)
    assert not needs.problem(machine("a", gpu_memory=52 * _GIB))
    problem = "its GPUs have 40.0 GiB, and a training rank needs one of at least 52.0 GiB"
    assert needs.problem(machine("a", gpu_memory=40 * _GIB)) == problem


def test_gpu_with_its_nominal_memory_is_enough() -> None:
    needs = Needs.of([Process((0,))], gpu_memory=80 * _GIB)
    assert not needs.problem(machine("a", gpu_memory=81559 << 20))
    assert needs.problem(machine("a", gpu_memory=76 * _GIB))


def test_unknown_gpu_memory_refuses_no_machine() -> None:
    """A part of a GPU (MIG), or a machine without nvidia-smi."""
    assert not two_nodes().misfit(machine("a", gpu_memory=0))

"""CPU cores near a GPU, on a machine of two sockets with two GPUs each: a folder in place of /proc, /sys and /dev."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realsys.cluster.gpu_environment import as_cpu_list, bind_to_gpus, cores_near, parse_cpu_list, present_gpus

#: PCI address -> minor number, NUMA node. The minor numbers do not follow the addresses.
GPUS = {"0000:0f:00.0": (1, 0), "0000:2b:00.0": (0, 0), "0000:90:00.0": (3, 1), "0000:B7:00.0": (2, 1)}
CORES = {0: "0-3,8-11", 1: "4-7,12-15"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for address, (minor, node) in GPUS.items():
        information = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
        write(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", information)
        write(tmp_path / f"sys/bus/pci/devices/{address.lower()}/numa_node", f"{node}\n")
        write(tmp_path / f"dev/nvidia{minor}", "")
    for node, cores in CORES.items():
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{cores}\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("ids", "cores"),
    [
        (["0"], "0-3,8-11"),
        (["2"], "4-7,12-15"),
        (["GPU-2"], "4-7,12-15"),
        (["1", "2"], "0-15"),
        (["9"], ""),
        (["MIG-7"], ""),
    ],
)
def test_cores_are_those_of_the_numa_nodes(root: Path, ids: list[str], cores: str) -> None:
    assert as_cpu_list(cores_near(ids, present_gpus(root), root)) == cores


def test_hidden_gpus_are_not_counted(root: Path) -> None:
    """CUDA's GPU 0 is the first one that the process may open."""
    for minor in (0, 1):
        (root / f"dev/nvidia{minor}").unlink()
    assert as_cpu_list(cores_near(["0"], present_gpus(root), root)) == CORES[1]


def test_unknown_numa_node_gives_no_cores(root: Path) -> None:
    write(root / "sys/bus/pci/devices/0000:0f:00.0/numa_node", "-1\n")
    gpus = present_gpus(root)
    assert not cores_near(["0"], gpus, root)
    assert not cores_near(["0", "2"], gpus, root)


@pytest.mark.parametrize(
    ("visible", "allowed", "bound"),
    [("0", "0-15", "0-3,8-11"), ("0", "2-5", "2-3"), ("0", "4-7", None), ("", "0-15", None), (None, "0-15", None)],
)
def test_process_is_bound_within_its_allowed_cores(
    monkeypatch: pytest.MonkeyPatch, root: Path, visible: str | None, allowed: str, bound: str | None
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(parse_cpu_list(allowed)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(as_cpu_list(frozenset(cores))))
    cores = bind_to_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, root)
    assert calls == ([bound] if bound else [])
    assert as_cpu_list(cores) == (bound or "")

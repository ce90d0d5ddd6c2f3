"""Waits on a thread that a stop ends."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from realsys.cluster.gpu_devices import activate_flash_attention
from realsys.cluster.gpu_environment import (
    as_cpu_list,
    bind_to_gpus,
    cores_near,
    parse_cpu_list,
    prepare_environment,
    present_gpus,
)
from realsys.cluster.process import gpu_peak_bytes, on_thread
from realsys.errors import NameStoreError, WaitTimeout
from realsys.train.megatron import device as module

BOUND_S = 60.0


def never(_):
    """Take a callback for a stop that does not come."""


def test_result_of_the_thread_is_returned():
    assert on_thread(lambda: 7, never, BOUND_S, lambda: "") == 7


def test_error_of_the_thread_is_raised():
    def fail():
        raise NameStoreError("gone")

    with pytest.raises(NameStoreError, match="gone"):
        on_thread(fail, never, BOUND_S, lambda: "")


@pytest.mark.parametrize(
    ("on_stop", "timeout_s", "message"),
    [
        (lambda callback: callback(), BOUND_S, "stopped while waiting for a peer"),
        (never, 0.01, "waited 0.01 s for a peer"),
    ],
    ids=["stop", "deadline"],
)
def test_wait_ends_before_the_thread(on_stop, timeout_s, message):
    release = threading.Event()
    with pytest.raises(WaitTimeout) as raised:
        on_thread(lambda: release.wait(BOUND_S), on_stop, timeout_s, lambda: "a peer")
    release.set()
    assert str(raised.value) == message


@pytest.mark.parametrize(("initialized", "peak"), [(True, 9), (False, 0)])
def test_gpu_peak_is_that_of_the_fullest(monkeypatch, initialized, peak):
    """A process that has not used its GPU is not made to: that would take hundreds of MiB of it."""
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized, device_count=lambda: 2, max_memory_allocated=[4, 9].__getitem__
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert gpu_peak_bytes() == peak


def test_process_without_torch_has_no_gpu(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_peak_bytes() == 0


# ---- CPU cores near a GPU, on a machine of two sockets with two GPUs each: a folder in place of /proc, /sys and /dev


#: PCI address -> minor number, NUMA node. The minor numbers do not follow the addresses.
GPUS = {"0000:0f:00.0": (1, 0), "0000:2b:00.0": (0, 0), "0000:90:00.0": (3, 1), "0000:B7:00.0": (2, 1)}
CORES = {0: "0-3,8-11", 1: "4-7,12-15"}


@pytest.fixture
def root(tmp_path):
    for address, (minor, node) in GPUS.items():
        information = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
        write(tmp_path / f"proc/driver/nvidia/gpus/{address}/information", information)
        write(tmp_path / f"sys/bus/pci/devices/{address.lower()}/numa_node", f"{node}\n")
        write(tmp_path / f"dev/nvidia{minor}", "")
    for node, cores in CORES.items():
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{cores}\n")
    return tmp_path


def write(path, text):
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
def test_cores_are_those_of_the_numa_nodes(root, ids, cores):
    assert as_cpu_list(cores_near(ids, present_gpus(root), root)) == cores


def test_hidden_gpus_are_not_counted(root):
    """CUDA's GPU 0 is the first one that the process may open."""
    for minor in (0, 1):
        (root / f"dev/nvidia{minor}").unlink()
    assert as_cpu_list(cores_near(["0"], present_gpus(root), root)) == CORES[1]


def test_unknown_numa_node_gives_no_cores(root):
    write(root / "sys/bus/pci/devices/0000:0f:00.0/numa_node", "-1\n")
    gpus = present_gpus(root)
    assert not cores_near(["0"], gpus, root)
    assert not cores_near(["0", "2"], gpus, root)


@pytest.mark.parametrize(
    ("visible", "allowed", "bound"),
    [("0", "0-15", "0-3,8-11"), ("0", "2-5", "2-3"), ("0", "4-7", None), ("", "0-15", None), (None, "0-15", None)],
)
def test_process_is_bound_within_its_allowed_cores(monkeypatch, root, visible, allowed, bound):
    calls: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(parse_cpu_list(allowed)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append(as_cpu_list(frozenset(cores))))
    cores = bind_to_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, root)
    assert calls == ([bound] if bound else [])
    assert as_cpu_list(cores) == (bound or "")


# ---- Environment of training ranks on GPUs, and the algorithms that they ask torch for


def test_deterministic_rank_sets_cublas_and_nccl():
    environment = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Tree"}
    prepare_environment(environment, deterministic=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NCCL_ALGO"] == "Tree", "the user's choice stays"


@pytest.mark.parametrize(("visible", "deterministic"), [("0", False), ("", True)])
def test_other_ranks_set_neither(visible, deterministic):
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    prepare_environment(environment, deterministic=deterministic)
    assert not environment.keys() & {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"}


@pytest.mark.parametrize(
    ("kind", "deterministic", "asked"), [("cuda", True, [True]), ("cuda", False, []), ("cpu", True, [])]
)
def test_torch_is_asked_before_the_first_kernel(monkeypatch, kind, deterministic, asked):
    calls: list[object] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(module, "choose_device", lambda rank: torch.device(kind))
    monkeypatch.setattr(module, "attention_kernel", lambda: calls.append("kernel"))
    monkeypatch.setattr(module, "_stand_in_for_cuda", lambda: None)
    module.prepare_device(0, 1, deterministic=deterministic)
    assert calls == [*asked, *(["kernel"] if kind == "cuda" else [])]


def test_deterministic_attention_is_torchs_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked for FlashAttention"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not activate_flash_attention(lambda: None)

"""Choice of the device: a process that was given a GPU uses it or ends, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from realsys.cluster import gpu_devices
from realsys.cluster.gpu_devices import choose_device
from realsys.cluster.gpu_environment import is_given_gpu, prepare_environment
from realsys.config import machine
from realsys.config.machine import visible_gpus
from realsys.errors import DeviceError


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2, 3", ("2", "3")),
        ("1,-1,2", ("1",)),
        ("GPU-6c5b,MIG-77", ("GPU-6c5b", "MIG-77")),
        ("1,8", ("1",)),
    ],
)
def test_only_ids_before_an_invalid_one_count(chosen: str, ids: tuple[str, ...]) -> None:
    assert visible_gpus(chosen, 8) == ids


@pytest.mark.parametrize(
    ("chosen", "cuda_build", "present", "given"),
    [
        (None, True, 8, True),
        (None, True, 0, False),
        (None, False, 8, False),  # a torch for CPU, as on a host whose GPUs belong to SGLang
        ("0", False, 0, True),
        ("-1", True, 8, False),
        ("NoDevFiles", True, 8, False),
        ("", True, 8, False),
    ],
)
def test_process_with_an_id_was_given_a_gpu(
    chosen: str | None, cuda_build: bool, present: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_torch_has_cuda", lambda: cuda_build)
    monkeypatch.setattr(machine, "_present_gpus", lambda: present)
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert is_given_gpu(environment) is given
    prepare_environment(environment, deterministic=True)  # without CUBLAS_WORKSPACE_CONFIG the first product fails
    assert ("CUBLAS_WORKSPACE_CONFIG" in environment) is ("PYTORCH_ALLOC_CONF" in environment) is given


def test_process_without_gpu_computes_on_the_cpu() -> None:
    assert choose_device(3, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == torch.device("cpu")


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore lines")


@pytest.mark.parametrize(
    ("available", "set_device", "cause"),
    [
        (lambda: False, lambda _: None, "torch finds no CUDA device"),
        (lambda: True, fails, "all CUDA-capable devices are busy or unavailable"),
    ],
)
def test_unusable_gpu_is_an_error_with_its_circumstances(
    available: Callable[[], bool], set_device: Callable[..., None], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_devices, "_driver", lambda: "470.57.02")
    with pytest.raises(DeviceError) as caught:
        choose_device(0, {"CUDA_VISIBLE_DEVICES": "5"})
    message = str(caught.value)
    build = f"torch {torch.__version__}, built for CUDA 13.0"
    assert all(part in message for part in (cause, "driver 470.57.02", build, "CUDA_VISIBLE_DEVICES=5"))
    assert "\n" not in message and caught.value.exit_code == 2 and caught.value.permanent


def test_gpu_without_expandable_segments_works_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first allocation fails, until the allocator is told to do without."""
    settings = ["expandable_segments:True"]
    zeros = torch.zeros

    def allocate(*size: int, device: torch.device) -> torch.Tensor:
        if settings[-1] == "expandable_segments:True":
            raise RuntimeError("CUDA driver error: operation not supported\nmore lines")
        return zeros(*size)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(DeviceError, match="operation not supported"):  # it has another allocator by choice
        choose_device(0, environment | {"PYTORCH_ALLOC_CONF": "backend:native"})
    prepare_environment(environment)
    assert choose_device(0, environment) == torch.device("cuda", 0)
    assert "operation not supported; memory" in caplog.text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, "expandable_segments:True"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_rank_with_a_gpu_gets_expandable_segments(environment: dict[str, str], expected: str | None) -> None:
    prepare_environment(environment)
    assert environment.get("PYTORCH_ALLOC_CONF") == expected

"""Tests that need a GPU: ``make gpu-test``. Without one each is skipped by name.

REALSYS_GPU_STAND_IN=1 runs them on the CPU, with a reference in place of the attention kernel: it tests the tests.
"""

import os
from collections.abc import Callable

import pytest
import torch

#: ``torch.cuda.is_available`` would otherwise start the CUDA runtime here, and no forked rank could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
STAND_IN = os.environ.get("REALSYS_GPU_STAND_IN") == "1"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")

#: ``compute_on("gpu")``, ``compute_on("cpu")``: the device of the ranks that are forked from now on
ComputeOn = Callable[[str], None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not STAND_IN and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def two_gpus() -> None:
    """Skip the test on a machine with one GPU: NCCL refuses two ranks on it."""
    if not STAND_IN and (there := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs, {there} is there")


@pytest.fixture
def compute_on(monkeypatch: pytest.MonkeyPatch) -> ComputeOn:
    def choose(device: str) -> None:
        if device == "cpu" or STAND_IN:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        elif VISIBLE is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)

    return choose

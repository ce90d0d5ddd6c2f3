"""Environment of training ranks on GPUs, and the algorithms that they ask torch for."""

from __future__ import annotations

import pytest
import torch

from realsys.cluster.gpu_devices import activate_flash_attention_3
from realsys.cluster.gpu_environment import prepare_environment
from realsys.train.megatron import device as module


def test_deterministic_rank_sets_cublas_and_nccl() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Tree"}
    prepare_environment(environment, deterministic=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NCCL_ALGO"] == "Tree", "the user's choice stays"


@pytest.mark.parametrize(("visible", "deterministic"), [("0", False), ("", True)])
def test_other_ranks_set_neither(visible: str, deterministic: bool) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    prepare_environment(environment, deterministic=deterministic)
    assert not environment.keys() & {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"}


@pytest.mark.parametrize(
    ("kind", "deterministic", "asked"), [("cuda", True, [True]), ("cuda", False, []), ("cpu", True, [])]
)
def test_torch_is_asked_before_the_first_kernel(
    monkeypatch: pytest.MonkeyPatch, kind: str, deterministic: bool, asked: list[bool]
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(module, "choose_device", lambda rank: torch.device(kind))
    monkeypatch.setattr(module, "attention_kernel", lambda: calls.append("kernel"))
    monkeypatch.setattr(module, "_stand_in_for_cuda", lambda: None)
    module.prepare_device(0, 1, deterministic=deterministic)
    assert calls == [*asked, *(["kernel"] if kind == "cuda" else [])]


def test_deterministic_attention_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked for FlashAttention 3"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not activate_flash_attention_3(lambda: None)

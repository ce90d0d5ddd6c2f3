"""Fused steps of torch's Adam: where they run, and where a checkpoint puts the count of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from realsys.train.checkpoint.saver import HeldParameter
from realsys.train.megatron import train_engine as module


def chained(inner: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_adam_steps_fused_on_each_device(device: str) -> None:
    with FakeTensorMode():
        inner = torch.optim.AdamW([torch.empty(4, device=device).requires_grad_()])
        module._fuse(chained(inner))
    assert inner.param_groups[0]["fused"] is True


def test_other_optimizers_get_no_flag() -> None:
    inner = torch.optim.SGD([torch.zeros(4, requires_grad=True)], lr=0.1)
    module._fuse(chained(inner))
    module._fuse(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None)]))  # a stage without parameters
    assert not inner.param_groups[0].get("fused")


def test_fused_steps_equal_those_of_the_default() -> None:
    torch.manual_seed(2)
    start, gradients = torch.randn(64), torch.randn(3, 64)
    stepped = []
    for fuse in (True, False):
        parameter = start.clone().requires_grad_()
        inner = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
        if fuse:
            module._fuse(chained(inner))
        for gradient in gradients:
            parameter.grad = gradient.clone()
            inner.step()
        stepped.append(parameter.detach())
    torch.testing.assert_close(*stepped, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_restored_step_count_is_where_the_kernel_reads(fused: bool, device: str) -> None:
    """The meta device stands in for a GPU."""
    key = torch.empty(4, device="meta", requires_grad=True)
    inner = torch.optim.AdamW([key])
    group = inner.param_groups[0] | {"fused": fused}
    held = HeldParameter(inner, group, key, 0)
    held.restore({"step": torch.tensor(3.0), "exp_avg": torch.empty(4, device="meta")})
    assert inner.state[key]["step"].device.type == device

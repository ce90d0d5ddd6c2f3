"""The attention kernel: choice by signature, equality with the bucket path, shapes and types under fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from realsys.cluster import gpu_devices as attention
from realsys.cluster.gpu_devices import attention_kernel, choose_kernel
from realsys.errors import DeviceError
from realsys.train.megatron import layers
from realsys.train.megatron.layers import PackedAttention, pack_segments
from realsys.train.megatron.megatron_core import TransformerConfig
from tests.support.gpu.reference_attention import POSITIONAL, RECORDED, recorded, reference

LENGTHS = [9, 7, 7, 3, 1]  # a segment of one token is the dummy of a rank without sequences


def attend(kernel: bool, tensors: Sequence[torch.Tensor], heads: int, kv_heads: int) -> torch.Tensor:
    """Run the core attention of the trainer on packed [t, heads, d] tensors."""
    size = tensors[0].shape[-1]
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=kv_heads, kv_channels=size
    )
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / size, device=tensors[0].device)
    packed = pack_segments(LENGTHS, frequencies, tensors[0].dtype, kernel=kernel)
    return PackedAttention(config, 1)(*tensors, packed_seq_params=packed)


def random_tensors(heads: int, kv_heads: int, size: int = 16, **how: Any) -> list[torch.Tensor]:
    total = sum(LENGTHS)
    return [torch.randn(total, count, size, **how).requires_grad_() for count in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_kernel_path_equals_bucket_path(
    version: str, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and the gradients of query, key and value, with a kernel of each torch's signature."""
    torch.manual_seed(3)
    tensors = random_tensors(heads, kv_heads)
    monkeypatch.setattr(layers, "attention_kernel", lambda: choose_kernel(recorded(version, reference), version))
    outputs = [attend(kernel, tensors, heads, kv_heads) for kernel in (True, False)]
    slope = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, tensors, slope) for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-6, rtol=1e-5)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


#: segments of four rows: 0 1, 0 2, 0 3 4, and 5 alone
TREE = [(), (0,), (0,), (0,), (0, 3), ()]
SIZES = [9, 4, 2, 3, 5, 4]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_shared_beginning_equals_whole_rows(
    kernel: bool, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients of rows in segments are those of the rows one after the other."""
    torch.manual_seed(3)
    monkeypatch.setattr(layers, "attention_kernel", lambda: choose_kernel(recorded("2.13", reference), "2.13"))
    packed = [torch.randn(sum(SIZES), count, 16, dtype=torch.float64) for count in (heads, kv_heads, kv_heads)]
    ends = np.cumsum(SIZES)
    chains = [(0, 1), (0, 2), (0, 3, 4), (5,)]
    places = [np.concatenate([np.arange(ends[k] - SIZES[k], ends[k]) for k in chain]) for chain in chains]
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / 16)

    def attend(tensors: Sequence[torch.Tensor], lengths: list[int], parents: list[tuple[int, ...]]) -> torch.Tensor:
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * 16, num_attention_heads=heads, num_query_groups=kv_heads, kv_channels=16
        )
        made = pack_segments(lengths, frequencies, torch.float64, kernel=kernel, parents=parents)
        return PackedAttention(config, 1)(*tensors, packed_seq_params=made)

    for x in packed:
        x.requires_grad_()
    order = torch.from_numpy(np.concatenate(places))
    whole = attend([x[order] for x in packed], [len(row) for row in places], [])
    shared = attend(packed, SIZES, TREE)[order]
    torch.testing.assert_close(shared, whole, atol=1e-6, rtol=1e-5)
    slope = torch.randn_like(whole)
    for found, expected in zip(
        torch.autograd.grad(shared, packed, slope), torch.autograd.grad(whole, packed, slope), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [12, 20])
def test_kernel_gets_heads_of_a_multiple_of_eight(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are refused by its backward pass. The padding changes neither outputs nor gradients."""
    torch.manual_seed(3)
    tensors = random_tensors(4, 2, size)
    widths = []

    def padded(**arguments: Any) -> torch.Tensor:
        widths.extend(arguments[name].shape[-1] % 8 for name in ("query", "key", "value"))
        found: torch.Tensor = reference(**arguments)
        return found

    monkeypatch.setattr(layers, "attention_kernel", lambda: choose_kernel(recorded("2.13", padded), "2.13"))
    outputs = [attend(kernel, tensors, 4, 2) for kernel in (True, False)]
    slope = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, tensors, slope) for output in outputs]
    assert widths == [0, 0, 0]
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-6, rtol=1e-5)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(("version", "named"), [("2.11", False), ("2.12", True), ("2.13", True)])
def test_grouped_heads_are_named_where_known(version: str, named: bool) -> None:
    calls: list[dict[str, Any]] = []

    def run(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return torch.empty_like(arguments["query"])

    kernel = choose_kernel(recorded(version, run), version)
    for heads in (4, 2):
        kernel(torch.zeros(3, heads, 8), *2 * [torch.zeros(3, 2, 8)], 2 * (torch.tensor([0, 3]),), (3, 3), 0.5)
    assert [call.get("enable_gqa") for call in calls] == ([True, False] if named else [None, None])


def test_kernel_without_window_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match=r"varlen_attn of torch 2\.10 has no parameter scale and no window_size"):
        choose_kernel(recorded("2.10", reference), "2.10")


def test_installed_torch_has_a_recorded_signature() -> None:
    """A new torch whose kernel differs must be looked at before it is allowed in setup.py."""
    from torch.nn.attention.varlen import varlen_attn

    version = ".".join(torch.__version__.split(".")[:2])
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters == POSITIONAL + RECORDED[version]


def test_installed_kernel_runs_under_fake_tensors() -> None:
    """bfloat16, grouped heads, forwards and backwards: no argument is refused, and the shapes are right."""
    attention_kernel.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = random_tensors(12, 2, 64, dtype=torch.bfloat16)
        out = attend(True, tensors, 12, 2)
        assert (out.shape, out.dtype) == ((sum(LENGTHS), 12 * 64), torch.bfloat16)
        for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
            assert (gradient.shape, gradient.dtype) == (tensor.shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("major", "installed", "error", "used", "calls"),
    [
        (9, True, None, True, ["FA3"]),
        (9, False, None, False, []),
        (8, True, None, False, []),
        (9, True, RuntimeError("built for another CUDA"), False, ["FA3", "restored"]),
    ],
)
def test_flash_attention_3_is_used_where_it_runs(
    major: int, installed: bool, error: Exception | None, used: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def trial() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", seen.append)
    monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda: seen.append("restored"))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert attention.activate_flash_attention_3(trial) is used
    assert seen == calls

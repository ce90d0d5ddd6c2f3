"""GPUs of a process: which one it has, the attention kernel, and meters."""

import inspect
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from realsys.cluster import gpu_devices
from realsys.cluster.gpu_devices import (
    PEAK_TFLOPS,
    GpuMeter,
    NvmlSampler,
    attention_kernel,
    choose_device,
    choose_kernel,
    make_meter,
    nvml_sample,
    peak_flops,
)
from realsys.cluster.gpu_environment import is_given_gpu, prepare_environment
from realsys.config import machine
from realsys.errors import DeviceError
from realsys.train.megatron import layers
from realsys.train.megatron.layers import PackedAttention, pack_segments
from realsys.train.megatron.megatron_core import TransformerConfig
from tests.support.gpu.reference_attention import POSITIONAL, RECORDED, recorded, reference


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
def test_process_with_an_id_was_given_a_gpu(chosen, cuda_build, present, given, monkeypatch):
    monkeypatch.setattr(machine, "_torch_has_cuda", lambda: cuda_build)
    monkeypatch.setattr(machine, "_present_gpus", lambda: present)
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert is_given_gpu(environment) is given
    prepare_environment(environment, deterministic=True)  # without CUBLAS_WORKSPACE_CONFIG the first product fails
    assert ("CUBLAS_WORKSPACE_CONFIG" in environment) is ("PYTORCH_ALLOC_CONF" in environment) is given


def test_process_without_gpu_computes_on_the_cpu():
    assert choose_device(3, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == torch.device("cpu")


def fails(*_, **__):
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore lines")


@pytest.mark.parametrize(
    ("available", "set_device", "cause"),
    [
        (lambda: False, lambda _: None, "torch finds no CUDA device"),
        (lambda: True, fails, "all CUDA-capable devices are busy or unavailable"),
    ],
)
def test_unusable_gpu_is_an_error_with_its_circumstances(available, set_device, cause, monkeypatch):
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


def test_gpu_without_expandable_segments_works_without_them(monkeypatch, caplog):
    """The first allocation fails, until the allocator is told to do without."""
    settings = ["expandable_segments:True"]
    zeros = torch.zeros

    def allocate(*size, device):
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
def test_rank_with_a_gpu_gets_expandable_segments(environment, expected):
    prepare_environment(environment)
    assert environment.get("PYTORCH_ALLOC_CONF") == expected


# ---- The attention kernel: choice by signature, equality with the bucket path, shapes and types under fake tensors


LENGTHS = [9, 7, 7, 3, 1]  # a segment of one token is the dummy of a rank without sequences


def attend(kernel, tensors, heads, kv_heads):
    """Run the core attention of the trainer on packed [t, heads, d] tensors."""
    size = tensors[0].shape[-1]
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=kv_heads, kv_channels=size
    )
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / size, device=tensors[0].device)
    packed = pack_segments(LENGTHS, frequencies, tensors[0].dtype, kernel=kernel)
    return PackedAttention(config, 1)(*tensors, packed_seq_params=packed)


def random_tensors(heads, kv_heads, size=16, **how):
    total = sum(LENGTHS)
    return [torch.randn(total, count, size, **how).requires_grad_() for count in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13", "2.14"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_kernel_path_equals_bucket_path(version, heads, kv_heads, monkeypatch):
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
def test_shared_beginning_equals_whole_rows(kernel, heads, kv_heads, monkeypatch):
    """Outputs and gradients of rows in segments are those of the rows one after the other."""
    torch.manual_seed(3)
    monkeypatch.setattr(layers, "attention_kernel", lambda: choose_kernel(recorded("2.13", reference), "2.13"))
    packed = [torch.randn(sum(SIZES), count, 16, dtype=torch.float64) for count in (heads, kv_heads, kv_heads)]
    ends = np.cumsum(SIZES)
    chains = [(0, 1), (0, 2), (0, 3, 4), (5,)]
    places = [np.concatenate([np.arange(ends[k] - SIZES[k], ends[k]) for k in chain]) for chain in chains]
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / 16)

    def attend(tensors, lengths, parents):
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
def test_kernel_gets_heads_of_a_multiple_of_eight(size, monkeypatch):
    """Others are refused by its backward pass. The padding changes neither outputs nor gradients."""
    torch.manual_seed(3)
    tensors = random_tensors(4, 2, size)
    widths = []

    def padded(**arguments):
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


@pytest.mark.parametrize(("version", "named"), [("2.11", False), ("2.12", True), ("2.13", True), ("2.14", True)])
def test_grouped_heads_are_named_where_known(version, named):
    calls: list[dict[str, Any]] = []

    def run(**arguments):
        calls.append(arguments)
        return torch.empty_like(arguments["query"])

    kernel = choose_kernel(recorded(version, run), version)
    for heads in (4, 2):
        kernel(torch.zeros(3, heads, 8), *2 * [torch.zeros(3, 2, 8)], 2 * (torch.tensor([0, 3]),), (3, 3), 0.5)
    assert [call.get("enable_gqa") for call in calls] == ([True, False] if named else [None, None])


def test_kernel_without_window_is_refused_by_name():
    with pytest.raises(DeviceError, match=r"varlen_attn of torch 2\.10 has no parameter scale and no window_size"):
        choose_kernel(recorded("2.10", reference), "2.10")


def test_installed_torch_has_a_recorded_signature():
    """A new torch whose kernel differs must be looked at before it is allowed in setup.py."""
    from torch.nn.attention.varlen import varlen_attn

    version = ".".join(torch.__version__.split(".")[:2])
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters == POSITIONAL + RECORDED[version]


def test_installed_kernel_runs_under_fake_tensors():
    """bfloat16, grouped heads, forwards and backwards: no argument is refused, and the shapes are right."""
    attention_kernel.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = random_tensors(12, 2, 64, dtype=torch.bfloat16)
        out = attend(True, tensors, 12, 2)
        assert (out.shape, out.dtype) == ((sum(LENGTHS), 12 * 64), torch.bfloat16)
        for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
            assert (gradient.shape, gradient.dtype) == (tensor.shape, torch.bfloat16)


FA3, FA4 = "flash_attn_interface", "flash_attn.cute"


class CompilerError(Exception):
    """One of a library's own, as FlashAttention 4 raises them."""


@pytest.mark.parametrize(
    ("major", "installed", "broken", "used", "calls"),
    [
        (9, [FA3, FA4], "", "FA3", ["FA3"]),
        (9, [FA4], "", "FA4", ["FA4"]),
        (9, [], "", "", []),
        (9, [FA3], "FA3", "", ["FA3", "restored"]),
        (9, [FA3, FA4], "FA3", "FA4", ["FA3", "restored", "FA4"]),
        (10, [FA3, FA4], "", "FA4", ["FA4"]),
        (10, [FA3], "", "", []),
        (8, [FA3, FA4], "", "", []),
    ],
)
def test_fastest_attention_that_runs_is_used(major, installed, broken, used, calls, monkeypatch):
    """FlashAttention 3 knows Hopper only, 4 Hopper and Blackwell. Without its package a module has no parent."""
    seen: list[str] = []

    def trial():
        if seen[-1] == broken:
            raise CompilerError("built for another CUDA")

    def find_spec(name):
        if name not in installed:
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", seen.append)
    monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda: seen.append("restored"))
    monkeypatch.setattr(gpu_devices.importlib.util, "find_spec", find_spec)
    assert gpu_devices.activate_flash_attention(trial) == used
    assert seen == calls


# ---- Meters of a GPU with stand-ins for NVML and for torch's memory counters


CUDA = torch.device("cuda", 0)


class NvmlError(Exception):
    """Stand-in of pynvml.NVMLError."""


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml that knows one GPU."""

    def handle(uuid):
        if uuid != "GPU-1":
            raise NvmlError("Not Found")
        return uuid

    module = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GB200", 2500),
        ("Tesla T4", 0),
    ],
)
def test_peak_rate_is_found_by_name(name, tflops):
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops(name, 790.0) == 790e12


def test_every_line_of_the_table_can_match():
    assert [peak_flops(f"NVIDIA {part}") for part, _ in PEAK_TFLOPS] == [peak * 1e12 for _, peak in PEAK_TFLOPS]


def test_reading_covers_the_time_since_the_last():
    samples = iter([(0.2, 5.0), (0.6, 9.0), (1.0, 7.0)])
    sampler = NvmlSampler(lambda: next(samples))
    assert sampler.read() == {}
    sampler.take()
    sampler.take()
    assert sampler.read() == {"utilisation": pytest.approx(0.4), "used_bytes": 9.0}
    sampler.take()
    assert sampler.read() == {"utilisation": 1.0, "used_bytes": 7.0}


def test_thread_samples_until_it_is_stopped():
    taken = threading.Event()

    def sample():
        taken.set()
        return 0.5, 1.0

    sampler = NvmlSampler(sample, interval_s=60.0)
    sampler.start()
    assert taken.wait(30)
    sampler.stop()
    assert sampler.read() == {"utilisation": 0.5, "used_bytes": 1.0}


def test_failing_nvml_ends_only_its_thread(caplog):
    def sample():
        raise NvmlError("GPU is lost")

    sampler = NvmlSampler(sample)
    sampler.start()
    sampler.stop()
    assert sampler.read() == {} and "GPU is lost" in caplog.text


def test_sample_has_utilisation_and_memory(nvml):
    sample = nvml_sample("GPU-1")
    assert sample is not None and sample() == (0.75, float(3 << 30))


def test_without_nvml_or_its_gpu_nothing_is_sampled(nvml, monkeypatch):
    assert nvml_sample("GPU-2") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_sample("GPU-1") is None


def test_meter_reports_peak_memory_and_rates(monkeypatch):
    resets: list[Any] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40 << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    sampler = NvmlSampler(lambda: (0.5, 8.0))
    sampler.take()
    found = GpuMeter(CUDA, 989e12, sampler).read(3e12, 4e12)
    expected = {"flops": 3e12, "computed_flops": 4e12, "peak_flops": 989e12, "peak_bytes": float(40 << 30)}
    assert found == expected | {"utilisation": 0.5, "used_bytes": 8.0}
    assert GpuMeter(CUDA, 0.0).read(3e12, 4e12) == {"peak_bytes": float(40 << 30)}
    assert resets == [CUDA, CUDA]


def test_meter_is_made_for_gpus_only(nvml, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert make_meter(torch.device("cpu"), 0.0) is None
    made = make_meter(CUDA, 0.0)
    assert made is not None and made.sampler is not None and made.peak == 989e12
    made.sampler.stop()
    monkeypatch.setattr(gpu_devices, "nvml_sample", lambda uuid: None)
    without = make_meter(CUDA, 700.0)
    assert without is not None and without.sampler is None and without.peak == 700e12

"""Error files."""

import asyncio
import inspect
import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from realsys.cluster import gpu_devices
from realsys.cluster import gpu_devices as attention
from realsys.cluster.aio import on_disk
from realsys.cluster.failure import ErrorRecord, read_errors, record_of, write_error
from realsys.cluster.gpu_devices import (
    PEAK_TFLOPS,
    GpuMeter,
    NvmlSampler,
    attention_kernel,
    choose_kernel,
    make_meter,
    nvml_sample,
    peak_flops,
)
from realsys.errors import ConfigError, DeviceError, WaitTimeout
from realsys.train.megatron import layers
from realsys.train.megatron.layers import PackedAttention, pack_segments
from realsys.train.megatron.megatron_core import TransformerConfig
from tests.support.gpu.reference_attention import POSITIONAL, RECORDED, recorded, reference


def record(time, index=0, pid=1):
    return ErrorRecord(time, "model_worker", index, pid, "host", "ValueError", f"at {time}", "trace")


def test_records_come_back_earliest_first(tmp_path):
    for time in (3.0, 1.0, 2.0):
        write_error(tmp_path / "errors", record(time, index=int(time)))
    assert [r.time for r in read_errors(tmp_path / "errors")] == [1.0, 2.0, 3.0]


def test_reused_pid_overwrites_no_error_file(tmp_path):
    first = write_error(tmp_path, record(1.0, pid=7))
    second = write_error(tmp_path, record(2.0, pid=7))
    assert first.name == "model_worker-0-7.json" and second != first
    assert [r.message for r in read_errors(tmp_path)] == ["at 1.0", "at 2.0"]
    assert all(p.suffix == ".json" for p in tmp_path.iterdir())


def test_record_names_worker_type_and_place():
    try:
        raise ConfigError("train.lr", -1, "must be > 0\nand more")
    except ConfigError as exc:
        made = record_of("master_worker", 2, exc)
    assert (made.pid, made.worker, made.type, made.exit_code) == (os.getpid(), "master_worker/2", "ConfigError", 2)
    assert made.message == "config: train.lr=-1: must be > 0" and "test_failure.py" in made.traceback
    assert "and more" in made.traceback and "\n" not in str(made)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"text"'])
def test_foreign_file_hides_no_record(tmp_path, content, caplog):
    write_error(tmp_path, record(1.0))
    (tmp_path / "other.json").write_text(content)
    assert [r.time for r in read_errors(tmp_path)] == [1.0] and "other.json" in caplog.text


def test_later_fields_and_odd_text_are_read(tmp_path):
    path = write_error(tmp_path, ErrorRecord(1.0, "k", 0, 1, "h", "E", "lone \ud800", "t"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "new_field": 1}))
    (read,) = read_errors(tmp_path)
    assert read.message == "lone \ud800"


def test_no_folder_means_no_errors(tmp_path):
    assert read_errors(tmp_path / "none") == []


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


@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13"])
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


@pytest.mark.parametrize(("version", "named"), [("2.11", False), ("2.12", True), ("2.13", True)])
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


@pytest.mark.parametrize(
    ("major", "installed", "error", "used", "calls"),
    [
        (9, True, None, True, ["FA3"]),
        (9, False, None, False, []),
        (8, True, None, False, []),
        (9, True, RuntimeError("built for another CUDA"), False, ["FA3", "restored"]),
    ],
)
def test_flash_attention_3_is_used_where_it_runs(major, installed, error, used, calls, monkeypatch):
    seen: list[str] = []

    def trial():
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", seen.append)
    monkeypatch.setattr("torch.nn.attention.restore_flash_attention_impl", lambda: seen.append("restored"))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert attention.activate_flash_attention_3(trial) is used
    assert seen == calls


# ---- Disk work of the master: in a thread, and with a time limit


def test_result_and_error_are_passed_on():
    async def body():
        assert await on_disk("reading", 60.0, lambda: threading.current_thread().name) == "reading"
        for error in (OSError(28, "No space left on device"), TimeoutError("of its own")):

            def fail(error=error):
                raise error

            with pytest.raises(type(error)) as caught:
                await on_disk("writing", 60.0, fail)
            assert caught.value is error

    asyncio.run(body())


def test_hanging_disk_blocks_no_loop():
    """The loop's own threads are waited for when it ends: this would never return."""
    released = threading.Event()
    try:
        with pytest.raises(WaitTimeout, match=r"publishing v3: not done within 0\.01 s; the disk hangs"):
            asyncio.run(on_disk("publishing v3", 0.01, released.wait))
    finally:
        released.set()


def test_late_result_does_not_disturb_the_loop():
    async def body():
        released, ended = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work():
            released.wait()
            loop.call_soon_threadsafe(loop.call_soon_threadsafe, ended.set)  # behind what the thread itself posts

        task = asyncio.create_task(on_disk("work", 60.0, work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(body(), debug=True)


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
    found = GpuMeter(CUDA, 989e12, sampler).read(3e12)
    expected = {"flops": 3e12, "peak_flops": 989e12, "peak_bytes": float(40 << 30)}
    assert found == expected | {"utilisation": 0.5, "used_bytes": 8.0}
    assert GpuMeter(CUDA, 0.0).read(3e12) == {"peak_bytes": float(40 << 30)}
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

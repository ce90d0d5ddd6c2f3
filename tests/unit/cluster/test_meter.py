"""Meters of a GPU with stand-ins for NVML and for torch's memory counters."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realsys.cluster import gpu_devices
from realsys.cluster.gpu_devices import PEAK_TFLOPS, GpuMeter, NvmlSampler, make_meter, nvml_sample, peak_flops

CUDA = torch.device("cuda", 0)


class NvmlError(Exception):
    """Stand-in of pynvml.NVMLError."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pynvml that knows one GPU."""

    def handle(uuid: str) -> str:
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
def test_peak_rate_is_found_by_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops(name, 790.0) == 790e12


def test_every_line_of_the_table_can_match() -> None:
    assert [peak_flops(f"NVIDIA {part}") for part, _ in PEAK_TFLOPS] == [peak * 1e12 for _, peak in PEAK_TFLOPS]


def test_reading_covers_the_time_since_the_last() -> None:
    samples = iter([(0.2, 5.0), (0.6, 9.0), (1.0, 7.0)])
    sampler = NvmlSampler(lambda: next(samples))
    assert sampler.read() == {}
    sampler.take()
    sampler.take()
    assert sampler.read() == {"utilisation": pytest.approx(0.4), "used_bytes": 9.0}
    sampler.take()
    assert sampler.read() == {"utilisation": 1.0, "used_bytes": 7.0}


def test_thread_samples_until_it_is_stopped() -> None:
    taken = threading.Event()

    def sample() -> tuple[float, float]:
        taken.set()
        return 0.5, 1.0

    sampler = NvmlSampler(sample, interval_s=60.0)
    sampler.start()
    assert taken.wait(30)
    sampler.stop()
    assert sampler.read() == {"utilisation": 0.5, "used_bytes": 1.0}


def test_failing_nvml_ends_only_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    def sample() -> tuple[float, float]:
        raise NvmlError("GPU is lost")

    sampler = NvmlSampler(sample)
    sampler.start()
    sampler.stop()
    assert sampler.read() == {} and "GPU is lost" in caplog.text


def test_sample_has_utilisation_and_memory(nvml: SimpleNamespace) -> None:
    sample = nvml_sample("GPU-1")
    assert sample is not None and sample() == (0.75, float(3 << 30))


def test_without_nvml_or_its_gpu_nothing_is_sampled(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_sample("GPU-2") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_sample("GPU-1") is None


def test_meter_reports_peak_memory_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_meter_is_made_for_gpus_only(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert make_meter(torch.device("cpu"), 0.0) is None
    made = make_meter(CUDA, 0.0)
    assert made is not None and made.sampler is not None and made.peak == 989e12
    made.sampler.stop()
    monkeypatch.setattr(gpu_devices, "nvml_sample", lambda uuid: None)
    without = make_meter(CUDA, 700.0)
    assert without is not None and without.sampler is None and without.peak == 700e12

"""Meters of one rank's GPU: peak memory of torch, and utilisation and memory from NVML.

thread of NvmlSampler   a sample a second ──> mean and maximum since the last reading
end of a call           GpuMeter.read ──────> MfcReply.gpu
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from realsys.gpu.peak import peak_flops

log = logging.getLogger(__name__)

#: Return utilisation in [0, 1] and memory in bytes, of all processes on the GPU.
Sample = Callable[[], tuple[float, float]]


class NvmlSampler:
    """Samples of one GPU, taken by a thread until ``stop``."""

    def __init__(self, sample: Sample, interval_s: float = 1.0) -> None:
        self._sample = sample
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._samples = 0  # since the last reading
        self._utilisation = 0.0  # their sum
        self._most_bytes = 0.0
        self._stopped = threading.Event()
        # A daemon: a worker that must end does not wait for the driver.
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def take(self) -> None:
        """Take one sample."""
        utilisation, used = self._sample()
        with self._lock:
            self._samples += 1
            self._utilisation += utilisation
            self._most_bytes = max(self._most_bytes, used)

    def read(self) -> dict[str, float]:
        """Return mean utilisation and largest memory since the last reading; {} without a sample since then."""
        with self._lock:
            if not self._samples:
                return {}
            found = {"utilisation": self._utilisation / self._samples, "used_bytes": self._most_bytes}
            self._samples = 0
            self._utilisation = self._most_bytes = 0.0
        return found

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.take()
            except Exception as error:  # NVML's own class; training must not end for want of a number
                log.warning("NVML failed, GPU utilisation is no longer reported: %s", error)
                return
            self._stopped.wait(self._interval_s)


def nvml_sample(uuid: str) -> Sample | None:
    """Return the sample function of the GPU with this UUID; None without NVML (``pip install 'realsys[gpu]'``)."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.info("pynvml is not installed: GPU utilisation is not reported")
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        log.warning("NVML cannot read GPU %s, its utilisation is not reported: %s", uuid, error)
        return None

    def sample() -> tuple[float, float]:
        rates, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        return rates.gpu / 100, float(memory.used)

    return sample


@dataclass
class GpuMeter:
    """Numbers of one rank's GPU for the replies of calls. ``peak``: FLOP/s, 0 if it is not known."""

    device: torch.device
    peak: float
    sampler: NvmlSampler | None = None

    def read(self, flops: float) -> dict[str, float]:
        """Return what happened since the last reading. ``flops``: this rank's model FLOPs since then."""
        peak_bytes = float(torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        rates = {"flops": flops, "peak_flops": self.peak} if self.peak else {}
        return {"peak_bytes": peak_bytes, **rates, **(self.sampler.read() if self.sampler else {})}


def make_meter(device: torch.device, peak_tflops: float) -> GpuMeter | None:
    """Return the started meter of ``device``; None for a CPU. ``peak_tflops``: overrides the table if it is not 0."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    peak = peak_flops(properties.name, peak_tflops)
    if not peak:
        log.warning("%s is not in the table of peak rates: set train.peak_tflops to get the MFU", properties.name)
    sample = nvml_sample(f"GPU-{properties.uuid}")
    sampler = None if sample is None else NvmlSampler(sample)
    if sampler is not None:
        sampler.start()
    return GpuMeter(device, peak, sampler)

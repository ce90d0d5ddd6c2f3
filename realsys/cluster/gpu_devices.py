"""Choice of the device of a process. A process that was given a GPU uses it or ends; it never falls back to the CPU.

One rank on the CPU in a world of GPUs would hang all: gloo and NCCL ranks wait for each other.

    CUDA_VISIBLE_DEVICES    GPUs       torch        device
    unset                   none       any          cpu
    unset                   present    CPU build    cpu
    unset                   present    CUDA build   cuda, or DeviceError
    an id                   any        any          cuda, or DeviceError
    empty, -1, NoDevFiles   any        any          cpu
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realsys.cluster.gpu_environment import ALLOCATOR, EXPANDABLE, is_given_gpu
from realsys.config.machine import VISIBLE
from realsys.errors import DeviceError

log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


def choose_device(index: int = 0, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device of this process, and make it torch's current one. ``index`` counts the visible GPUs around.

    Raises DeviceError if the process was given a GPU and cannot use it.
    """
    if not is_given_gpu(environment):
        return torch.device("cpu")
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise DeviceError(_problem("torch finds no CUDA device", environment))
        device = torch.device("cuda", index % count)
        torch.cuda.set_device(device)
        _allocate(device, environment)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise DeviceError(_problem(cause, environment)) from error
    return device


def _allocate(device: torch.device, environment: Mapping[str, str]) -> None:
    """Make the context: a GPU that is lost, full or held exclusively fails here. Raises RuntimeError.

    Expandable segments need the driver's management of virtual memory, which some virtual machines lack.
    """
    try:
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if environment.get(ALLOCATOR) != EXPANDABLE:
            raise
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch.zeros(1, device=device)
        cause = str(error).strip().partition("\n")[0]
        log.warning("without expandable segments, which this GPU refuses: %s; memory may break into pieces", cause)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on ``device``. The host does not wait for the copy, so it packs while the GPU computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _problem(cause: str, environment: Mapping[str, str]) -> str:
    visible = environment.get(VISIBLE, "not set")
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU only"
    return (
        f"this process was given a GPU and cannot use it: {cause} (driver {_driver()}; torch {torch.__version__}, "
        f"built {build}; CUDA_VISIBLE_DEVICES={visible}): install a torch that fits the driver, free or repair the "
        "GPU, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
    )


def _driver() -> str:
    """Return the version of the NVIDIA driver in the kernel."""
    try:
        words = _DRIVER.read_text("utf-8").split()
    except OSError:
        return "not loaded"
    return next((word for word in words if word[0].isdigit()), "of unknown version")


# ---- variable-length attention on CUDA: the call of torch's kernel, chosen once by the kernel's signature
#
# torch 2.11 and 2.12 differ. In 2.11 the kernel takes grouped query heads as they are and has no ``enable_gqa``; from
# 2.12 on it refuses them without ``enable_gqa``. A kernel without ``window_size`` or ``scale`` (torch 2.10) cannot
# compute causal attention as it is called here, and is refused by name.


#: query [t, heads, d], key and value [k, kv_heads, d], ends of queries and keys int32 [segments + 1] each, longest
#: segment of each, scale -> like query. The last query of a segment attends to all of its keys.
AttentionKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, Any], tuple[int, int], float], torch.Tensor
]

_NEEDED = frozenset({"scale", "window_size"})
_CAUSAL = (-1, 0)
_WIDTH_STEP = 8  # the kernel's backward pass needs heads whose width is a multiple of it
#: torch's name of a faster implementation, its module, its title, and the major compute capabilities that it supports:
#: 9 is Hopper, 10 Blackwell. The first that is installed and runs is used
_FLASH_ATTENTION = (
    ("FA3", "flash_attn_interface", "FlashAttention 3 (module flash_attn_interface)", (9,)),
    ("FA4", "flash_attn.cute", "FlashAttention 4 (pip install flash-attn-4)", (9, 10)),
)
_RESTORE = "restore_flash_attention_impl"


def choose_kernel(varlen_attn: Callable[..., Any], version: str = torch.__version__) -> AttentionKernel:
    """Return causal attention within segments by ``varlen_attn``. Raises DeviceError if its signature does not fit."""
    parameters = inspect.signature(varlen_attn).parameters
    if missing := sorted(_NEEDED - parameters.keys()):
        problem = f"varlen_attn of torch {version} has no parameter {' and no '.join(missing)}"
        raise DeviceError(f"{problem}: install torch 2.11 to 2.14")
    names_gqa = "enable_gqa" in parameters

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: tuple[Any, Any],
        longest: tuple[int, int],
        scale: float,
    ) -> torch.Tensor:
        grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if names_gqa else {}
        width = query.shape[-1]
        missing = -width % _WIDTH_STEP
        if missing:  # zeros add nothing to a score, and the values' zeros are cut off again
            query, key, value = (torch.nn.functional.pad(each, (0, missing)) for each in (query, key, value))
        arguments = (query, key, value, *ends, *longest)
        out = varlen_attn(*arguments, scale=scale, window_size=_CAUSAL, **grouped)
        assert isinstance(out, torch.Tensor)
        return out[..., :width] if missing else out  # the backward pass of a slice costs a copy

    return attend


@functools.cache
def attention_kernel() -> AttentionKernel:
    """Return the kernel of the installed torch. Raises DeviceError if it has none that fits."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        problem = f"torch {torch.__version__} has no torch.nn.attention.varlen.varlen_attn"
        raise DeviceError(f"{problem}: install torch 2.11 to 2.14") from None
    kernel = choose_kernel(varlen_attn)
    fast = activate_flash_attention(lambda: _try(kernel))
    log.info("attention kernel: varlen_attn of torch %s, %s", torch.__version__, fast or "its own FlashAttention 2")
    return kernel


def activate_flash_attention(trial: Callable[[], None]) -> str:
    """Let torch's kernel run FlashAttention 3 or 4 if this GPU and the installation have it. Return its name, or "".

    ``trial`` computes something with it. If it raises, torch's own implementation is put back. With deterministic
    algorithms that one stays, because its backward pass has them.
    """
    if torch.are_deterministic_algorithms_enabled() or not torch.cuda.is_available():
        return ""
    attention = importlib.import_module("torch.nn.attention")
    # An older torch knows other implementations only, or none, and may be unable to put its own back.
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    for name, module, title in fast_attention(torch.cuda.get_device_capability()[0]):
        if name not in known or not hasattr(attention, _RESTORE) or not _is_installed(module):
            continue
        try:
            attention.activate_flash_attention_impl(name)
            trial()
        except Exception as error:
            # Such as a wheel for another torch or another CUDA; FlashAttention 4 compiles its kernels here, with errors
            # of its own. Torch's own implementation computes the same.
            log.warning("%s is installed but does not run, another kernel is used instead: %s", title, error)
            getattr(attention, _RESTORE)()
        else:
            return name
    return ""


def fast_attention(major: int) -> list[tuple[str, str, str]]:
    """Return name, module and title of each implementation that is faster than torch's own on this capability."""
    return [(name, module, title) for name, module, title, majors in _FLASH_ATTENTION if major in majors]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # it has a parent that is missing, or broken
        return False


def _try(kernel: AttentionKernel) -> None:
    """Compute one small segment and its gradients on the current GPU."""
    query, key, value = (
        torch.ones(8, heads, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for heads in (2, 1, 1)
    )
    ends = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    torch.autograd.grad(kernel(query, key, value, (ends, ends), (8, 8), 0.125).sum(), (query, key, value))
    torch.cuda.synchronize()


# ---- meters of one rank's GPU: peak memory of torch, and utilisation and memory from NVML
#
# thread of NvmlSampler   a sample a second ──> mean and maximum since the last reading
# end of a call           GpuMeter.read ──────> MfcReply.gpu


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

    def read(self, flops: float, computed: float) -> dict[str, float]:
        """Return what happened since the last reading.

        ``flops``: this rank's model FLOPs since then; ``computed``: the same with recomputed layers.
        """
        peak_bytes = float(torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        rates = {"flops": flops, "computed_flops": computed, "peak_flops": self.peak} if self.peak else {}
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


# ---- peak rates of GPUs in bfloat16, for the model FLOPs utilisation (MFU)


#: Part of the name of a device -> TFLOP/s of dense bfloat16 products (data sheets of NVIDIA). The first match counts,
#: so a longer name is listed before a name that it contains. ``train.peak_tflops`` overrides this table.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),  # GH200 too
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A40", 150.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX A6000", 155.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
)


def peak_flops(device_name: str, override_tflops: float = 0.0) -> float:
    """Return the peak FLOP/s of a device; 0 if it is not in the table and ``override_tflops`` is 0."""
    if override_tflops:
        return override_tflops * 1e12
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS if part in device_name), 0.0)

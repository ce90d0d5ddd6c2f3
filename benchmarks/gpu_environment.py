"""Inventory of a GPU machine: versions, driver, devices, memory, and the modules of realsys that cannot be imported.

python -m benchmarks.gpu_environment
"""

from __future__ import annotations

import importlib
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu import require_gpu, write_rows
from realsys.cluster.gpu_devices import attention_kernel, peak_flops
from realsys.config.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy", "sglang", "nvidia-ml-py")
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def software() -> Iterator[tuple[str, Any]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "CUDA of torch", torch.version.cuda
    driver = Path("/proc/driver/nvidia/version")
    yield "driver", driver.read_text().splitlines()[0] if driver.exists() else "not found"
    attention_kernel()
    yield "attention kernel", torch.nn.attention.current_flash_attention_impl() or "torch's own"


def hardware() -> Iterator[tuple[str, Any]]:
    yield "machine", Machine.here()
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        peak = peak_flops(found.name) / 1e12
        yield f"GPU {index}", f"{found.name}, {found.total_memory / 2**30:.1f} GiB, peak {peak:g} TFLOP/s by its name"
    for folder in ("/dev/shm", "/tmp"):
        yield f"{folder} free", f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
    for limit in CGROUP:
        if limit.exists():
            yield "cgroup limit", limit.read_text().strip()


def imports() -> Iterator[tuple[str, Any]]:
    """Yield the modules of realsys that cannot be imported."""
    files = sorted((ROOT / "realsys").rglob("*.py"))
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if "cpu_support" not in file.parts
    ]
    failed = 0
    for name in names:
        try:
            importlib.import_module(name.removesuffix(".__init__"))
        except Exception as error:
            failed += 1
            yield name, f"{type(error).__name__}: {error}"
    yield "modules imported", f"{len(names) - failed} of {len(names)}"
    if failed:
        raise SystemExit(1)


def main() -> None:
    require_gpu()
    rows = []
    try:
        for part in (software, hardware, imports):
            rows += [{"what": what, "value": value} for what, value in part()]
    finally:
        write_rows("environment", rows or [{"what": "nothing", "value": ""}])


if __name__ == "__main__":
    main()

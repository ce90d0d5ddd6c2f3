"""Peak rates of GPUs in bfloat16, for the model FLOPs utilisation (MFU). No torch."""

from __future__ import annotations

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

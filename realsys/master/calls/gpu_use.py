"""Use of the GPUs by the calls of a step, from the readings in the replies of ModelWorkers.

reply   flops, peak_flops   model FLOPs of this rank in the call; peak FLOP/s of its GPU
        peak_bytes          most memory that torch held
        utilisation         share of the time since the last reply in which the GPU computed
        used_bytes          most memory in use on the GPU, of all processes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST = ("peak_bytes", "used_bytes")


def gpu_use(readings: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """Return the use of one call that took ``seconds``: ``mfu``, maxima over the ranks, mean utilisation.

    A number that no rank has read is absent.
    """
    use = _merge(readings)
    peak = seconds * sum(reading.get("peak_flops", 0.0) for reading in readings)
    if peak:
        use["mfu"] = sum(reading.get("flops", 0.0) for reading in readings) / peak
    return use


def step_gpu_use(calls: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the use of a step: maxima and means over its calls, and ``mfu`` by call. Empty on CPUs."""
    shares = {name: use["mfu"] for name, use in calls.items() if "mfu" in use}
    return {**_merge(list(calls.values())), **({"mfu": shares} if shares else {})}


def _merge(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in _LARGEST:
        if values := [reading[key] for reading in readings if key in reading]:
            found[key] = max(values)
    if values := [reading["utilisation"] for reading in readings if "utilisation" in reading]:
        found["utilisation"] = sum(values) / len(values)
    return found

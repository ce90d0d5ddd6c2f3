"""Predicted memory as lines of text, for `realsys run --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import dataflow_of
from realsys.config.memory.device_memory import GIB, DeviceUse, rank_uses, server_use, usable_bytes
from realsys.config.memory.memory_check import Place, parts_text
from realsys.config.schema import Config

_COLUMNS = ("weights", "gradients", "optimizer", "activations", "head", "KV cache", "other", "peak", "usable")


def device_lines(config: Config, place: Place) -> list[str]:
    """Return a table with a line for each kind of training rank, and one for a server. Raises ModelError.

    ``other``: other roles, temporaries of the optimizer's step, libraries. A peak is that of the phase that needs most.
    """
    allocation, here = parse_allocation(config.allocation), place.here
    uses = [use for use, _ in rank_uses(config, allocation, dataflow_of(config), on_gpu=here.ranks_on_gpu)]
    server = server_use(config, allocation, on_gpu=here.servers_on_gpu)
    is_large = max(use.total for use in (*uses, server)) >= GIB
    unit, name = (GIB, "GiB") if is_large else (1 << 20, "MiB")
    limits = [_usable(config, place, unit, on_gpu=here.ranks_on_gpu, server=False) for _ in uses]
    limits.append(_usable(config, place, unit, on_gpu=here.servers_on_gpu, server=True))
    rows = [_row(use, unit, limit) for use, limit in zip((*uses, server), limits, strict=True)]
    return _aligned([(f"device, {name}", *_COLUMNS), *rows])


def host_line(config: Config, place: Place) -> str:
    """Return the predicted host memory with its parts, in GiB. Raises ModelError."""
    name, use = place.fullest_host(config)
    free = f", {place.host_bytes / GIB:.1f} are free" if place.host_bytes else ""
    where = f" on {name}, the fullest node" if name else ""
    return f"about {use.total / GIB:.1f} GiB{where}{free} ({parts_text(use)})"


def _usable(config: Config, place: Place, unit: int, *, on_gpu: bool, server: bool) -> str:
    if not on_gpu:
        return "of the host"
    return f"{usable_bytes(config, place.gpu_bytes, server=server) / unit:.1f}" if place.gpu_bytes else "unknown"


def _row(use: DeviceUse, unit: int, usable: str) -> tuple[str, ...]:
    other = use.others + use.step + use.libraries
    sizes = (use.weights, use.gradients, use.optimizer, use.layers, use.head, use.cache, other, use.total)
    return (use.owner, *(f"{size / unit:.1f}" if size else "-" for size in sizes), usable)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

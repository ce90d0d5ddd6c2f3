"""Numbers and small pictures as text: shares that add up, curves on a fixed scale. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from realsys.manager.routing.rollout_workers import memory_sums
from realsys.observe.percent import apportioned, percent
from realsys.observe.screen.progress import Record, mean, number, time_parts

_BLOCKS = "▁▂▃▄▅▆▇█"
_ROUND = (1.0, 2.0, 5.0, 10.0)  # digits of a scale's ends


def fmt(value: float | None, spec: str) -> str:
    """Format a number; None becomes a dash. ``spec`` `.1%`: see ``percent``."""
    if value is None:
        return "-"
    return percent(value, int(spec[1:-1])) if spec.endswith("%") else format(value, spec)


def size_text(size: float) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"


def memory_of(status: Record) -> dict[str, float]:
    """Return process -> resident bytes of the servers and RolloutWorkers in the manager's status that have said it."""
    workers = status.get("workers")
    rows = [row for row in workers if isinstance(row, Mapping)] if isinstance(workers, Sequence) else []
    return {str(row.get("name")): size for row in rows if (size := number(row, "memory_bytes")) is not None}


def memory_briefly(status: Record) -> str:
    """Return the memory of servers and of RolloutWorkers in less than 30 cells; "" if none is known."""
    sums = memory_sums(memory_of(status))
    sizes = [(name, sums[f"{name}_bytes"] / 2**30) for name in ("servers", "workers") if sums.get(f"{name}_bytes")]
    return ", ".join(f"{name} {size:.{1 if size >= 0.1 else 2}f}" for name, size in sizes) + (" GiB" if sizes else "")


def memory_text(status: Record) -> str:
    """Return the memory of servers and of RolloutWorkers: their sum and the largest; "" if none is known."""
    sums, parts = memory_sums(memory_of(status)), []
    for name, shown in (("server", "servers"), ("worker", "RolloutWorkers")):
        if whole := sums.get(f"{name}s_bytes"):
            most = sums[f"{name}_bytes"]
            parts.append(f"{shown} {size_text(whole)}" + (f" (largest {size_text(most)})" if most < whole else ""))
    return ", ".join(parts)


def rate(record: Record, amount: str, seconds: str) -> float | None:
    """Return one field of a record divided by another; None without both."""
    top, bottom = number(record, amount), number(record, seconds)
    return top / bottom if top is not None and bottom else None


def worth_showing(metrics: Mapping[str, float], *others: Mapping[str, float]) -> list[str]:
    """Return the names in ``metrics``, without counts of the gateway that are 0 in all of the mappings."""
    return sorted(n for n in metrics if not n.startswith("gateway/") or any(each.get(n) for each in (metrics, *others)))


def failures_text(failures: object) -> str:
    """Return the completions whose verifier failed or exceeded a limit, by cause; "" if there are none."""
    counts = failures if isinstance(failures, Mapping) else {}
    return ", ".join(f"{number(counts, cause) or 0:,.0f} {cause}" for cause in sorted(counts))


def untrained_shares(record: Record) -> Mapping[str, float]:
    """Return reason -> share of the sampled tokens that were not trained."""
    shares = record.get("untrained")
    return shares if isinstance(shares, Mapping) else {}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns. ``right``: numbers of columns that are set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def set_(number: int, cell: str) -> str:
        return cell.rjust(widths[number]) if number in right else cell.ljust(widths[number])

    return ["  ".join(set_(number, cell) for number, cell in enumerate(row)).rstrip() for row in rows]


def time_split(records: Sequence[Record]) -> str:
    """Return the mean time of a step and the shares of its parts: `0.52 s: wait 10%, train 80%, other 10%`.

    The shares add up to 100 %; ``other`` is the time that belongs to no part. Parts of 0 % are left out.
    """
    total = mean(records, "seconds", "total")
    if not total:
        return "-"
    shares = apportioned(time_parts({part: mean(records, "seconds", part) for part in _parts(records)}), 100)
    parts = ", ".join(f"{part} {share}%" for part, share in shares.items() if share)
    return f"{total:.2f} s: {parts}" if parts else f"{total:.2f} s"


def _parts(records: Sequence[Record]) -> list[str]:
    last = records[-1].get("seconds") if records else None
    return list(last) if isinstance(last, Mapping) else []


def scale_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the scale of a curve: quarters if it stays between 0 and 1, else round numbers around it.

    So a curve from 48 % to 79 % rises by half of the height, and the scale does not follow the noise: a curve between
    88 % and 92 % is nearly flat.
    """
    if values and 0.0 <= min(values) <= max(values) <= 1.0:
        low = min(math.floor(4 * min(values)), 3) / 4
        return low, max(math.ceil(4 * max(values)) / 4, low + 0.25)
    return 0.0 - _round_up(-min(values, default=0.0)), max(1.0, _round_up(max(values, default=1.0)))


def _round_up(value: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... and 0 that is not below ``value``."""
    if value <= 0 or not math.isfinite(value):
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in _ROUND if digit * power >= value * (1 - 1e-9))


def sparkline(values: Sequence[float], low: float, high: float, width: int = 24) -> str:
    """Draw a curve with block characters on the scale from ``low`` to ``high``; "" for less than two values."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2:
        return ""
    if len(values) > width:  # mean of equal stretches
        bounds = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    steps = [(value - low) / (high - low) * (len(_BLOCKS) - 1) for value in values]
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, max(0, round(step)))] for step in steps)


def curve_text(records: Sequence[Record], *path: str, width: int = 19) -> str:
    """Draw the curve of a field, with the ends of its scale: `▁▂▃ 0..1`. "" for less than two values.

    ``width``: cells of both.
    """
    values = [value for value in (number(record, *path) for record in records) if value is not None]
    low, high = scale_of(values)
    scale = f"{low:g}..{high:g}"
    line = sparkline(values, low, high, width - 1 - len(scale))
    return f"{line} {scale}" if line else ""

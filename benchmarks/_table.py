"""Print a benchmark's rows as a table and keep them as JSON in ``benchmarks/results``."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def report(name: str, rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    """Print ``rows`` under the title ``name`` and write ``benchmarks/results/{name}.json``.

    The columns are the keys of all rows in the order they first appear. ``meta`` says how the numbers were made
    (settings, repetitions); cores, Python version and time are added to it.
    """
    if not rows:
        raise ValueError(f"benchmark {name}: no rows to report")
    settings = {**meta, **_environment()}
    print(f"{name}: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    print(format_table(rows))
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"{name}.json"
    staged = target.with_suffix(".json.tmp")
    staged.write_text(
        json.dumps({"name": name, "meta": settings, "rows": [dict(r) for r in rows]}, indent=2, default=_plain) + "\n"
    )
    staged.replace(target)


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text: numbers to the right, everything else to the left."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    numeric = [all(_is_number(row.get(column, 0)) for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if right else t.ljust(w) for t, w, right in zip(texts, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def _environment() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return f"({len(value)})"  # a curve: its numbers are in the file
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def _plain(value: object) -> object:
    """Numbers of numpy as Python's."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)

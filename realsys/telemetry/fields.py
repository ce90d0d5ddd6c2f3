"""Table of every field of the step log: name, unit, meaning, group. ``docs/metrics.md`` is made from it.

    record ──numbers──> {"staleness/mean": 1.5, ...} ──field_of──> Field, with the labels of an open name

A name is the path of a number in its record, joined by ``/``. The table has a name for each path. A part in braces
means any name: ``untrained/{reason}``, ``metrics/{name}``. The last such part of a
name may contain ``/``. Trackers, ``/metrics`` and the documentation use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from realsys.telemetry.field_table import FIELDS, Field

__all__ = ["FIELDS", "Field", "Found", "field_of", "names", "numbers"]


@dataclass(frozen=True, slots=True)
class Found:
    """A field and the parts of a name at its braces."""

    field: Field
    labels: Mapping[str, str]


def numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of all numbers of a record. Texts, lists and null have none; true is 1."""
    for key, value in record.items():
        if isinstance(value, float):
            yield f"{prefix}{key}", value
        elif isinstance(value, int):
            try:
                yield f"{prefix}{key}", float(value)
            except OverflowError:
                continue
        elif isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")


def names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all fields of a record, of those without a number, too."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from names(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}"


@lru_cache(8192)  # names of users' metrics are not bounded
def field_of(kind: str, name: str) -> Found | None:
    """Return the entry of a field of the records of ``kind``; None if the table has none."""
    fields = FIELDS.get(kind, {})
    if exact := fields.get(name):
        return Found(exact, {})
    for pattern, field in fields.items():
        if "{" in pattern and (match := _expression(pattern).fullmatch(name)):
            return Found(field, match.groupdict())
    return None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a name with braces. Only the last part of the name may contain ``/``."""
    parts = [
        f"(?P<{part[1:-1]}>{'.+' if last else '[^/]+'})" if part.startswith("{") else re.escape(part)
        for part, last in _parts(pattern)
    ]
    return re.compile("/".join(parts))


def _parts(pattern: str) -> Iterator[tuple[str, bool]]:
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        yield part, i == len(parts) - 1

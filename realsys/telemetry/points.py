"""Points of curves from the records of the step log: the names and numbers that trackers and ``/metrics`` show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from realsys.telemetry.fields import field_of, numbers

CURVES = ("train", "eval", "warmup")  # kinds of records with points
#: numbers of an evaluation that is not complete: the others would be those of the completions that ended first
_OF_INCOMPLETE = frozenset({"complete", "failed", "problems", "samples", "step"})


def shown_numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of a record, without what an evaluation that is not complete must not show."""
    is_incomplete = record.get("kind") == "eval" and record.get("complete") is False
    for name, value in numbers(record):
        if not is_incomplete or name in _OF_INCOMPLETE:
            yield name, value


def step_of(record: Mapping[str, Any]) -> int | None:
    """Return the place of a record on the axis of its curves; None without a readable step.

    The weights of an evaluation may be newer than the step after which it was due.
    """
    step, version = record.get("step"), record.get("version")
    if not isinstance(step, int):
        return None
    return max(step, version) if record.get("kind") == "eval" and isinstance(version, int) else step


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record as trackers get them: ``train/reward_mean``, ``eval/{set}/accuracy``."""
    kind = str(record.get("kind"))
    prefix = f"eval/{record.get('set', 'eval')}" if kind == "eval" else kind
    found = ((_metric(kind, prefix, name), value) for name, value in shown_numbers(record))
    return {name: value for name, value in found if name}


@lru_cache(8192)
def _metric(kind: str, prefix: str, name: str) -> str:
    """Return the name of a metric; "" for a field that is no curve."""
    found = field_of(kind, name)
    return f"{prefix}/{name}" if found is None or found.field.tracked else ""

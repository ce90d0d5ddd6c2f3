"""Points of curves from the records of the step log: the names and numbers that trackers and ``/metrics`` show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from realsys.observe.step_fields import Field, field_of, numbers

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


# ---- gauges of the newest numbers of the step log: ``realsys_train_*``, ``realsys_eval_*``, ``realsys_warmup_*``
#
#     stats/entropy_mean    -> realsys_train_stats_entropy_mean
#     untrained/{reason}    -> realsys_train_untrained{reason="stale"}
#     accuracy of a set     -> realsys_eval_accuracy{set="eval"}
#
# Name, unit and meaning are those of ``realsys.observe.step_fields`` (docs/metrics.md).


def curve_metrics(records: Iterable[Mapping[str, Any]]) -> list[GaugeMetricFamily]:
    """Return the gauges of all numbers in ``records``, the newest ones of the step log."""
    families: dict[str, GaugeMetricFamily] = {}
    for record in records:
        kind = str(record.get("kind"))
        own = {"set": str(record.get("set"))} if kind == "eval" else {}
        for name, value in shown_numbers(record):
            if found := field_of(kind, name):
                labels = {**own, **found.labels}
                family = families.setdefault(metric_name(kind, found.field), _family(kind, found.field, list(labels)))
                family.add_metric(list(labels.values()), value)
    return list(families.values())


def metric_name(kind: str, field: Field) -> str:
    """Return the name of a field in ``/metrics``: its path without the parts that are labels."""
    fixed = [part for part in field.name.split("/") if not part.startswith("{")]
    return "_".join(["realsys", kind, *fixed])


def _family(kind: str, field: Field, labels: list[str]) -> GaugeMetricFamily:
    unit = f" ({field.unit})" if field.unit else ""
    return GaugeMetricFamily(metric_name(kind, field), f"{field.meaning}{unit}", labels=labels)

"""Gauges of the newest numbers of the step log: ``realsys_train_*``, ``realsys_eval_*``, ``realsys_warmup_*``.

    stats/entropy_mean    -> realsys_train_stats_entropy_mean
    untrained/{reason}    -> realsys_train_untrained{reason="stale"}
    accuracy of a set     -> realsys_eval_accuracy{set="eval"}

Name, unit and meaning are those of ``realsys.telemetry.fields`` (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from realsys.telemetry.fields import Field, field_of
from realsys.telemetry.points import shown_numbers


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

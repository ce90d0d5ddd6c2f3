"""The table of fields: every name has one entry, ``/metrics`` can name it, and the page shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from realsys.observe.step_fields import FIELDS, GROUPS, field_of, metric_name, names, numbers, rewrite
from tests.support.telemetry.step_logs import undocumented

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")
ALL = [(kind, field) for kind, fields in FIELDS.items() for field in fields.values()]


def test_page_has_the_fields_of_the_table() -> None:
    assert rewrite(PAGE) == PAGE, "run `make docs`"


def test_every_field_has_meaning_and_group() -> None:
    assert [field.name for _, field in ALL if not field.meaning or field.group not in GROUPS] == []


def test_names_in_metrics_differ_and_are_valid() -> None:
    """A name of Prometheus has one set of labels."""
    labels: dict[str, set[tuple[str, ...]]] = {}
    for kind, field in ALL:
        labels.setdefault(metric_name(kind, field), set()).add(tuple(re.findall(r"{(\w+)}", field.name)))
    texts = {name for name in labels if not re.fullmatch(r"[a-z_][a-z0-9_]*", name)}
    assert texts == set() and [name for name, found in labels.items() if len(found) > 1] == []


@pytest.mark.parametrize(
    ("name", "entry", "labels"),
    [
        ("reward_mean", "reward_mean", {}),
        ("untrained/stale", "untrained/{reason}", {"reason": "stale"}),
        ("metrics/gateway/calls", "metrics/{name}", {"name": "gateway/calls"}),
        ("stats/w_ess", "stats/w_ess", {}),
        ("stats/my_call/loss", "stats/{name}", {"name": "my_call/loss"}),
    ],
)
def test_name_finds_entry_and_labels(name: str, entry: str, labels: dict[str, str]) -> None:
    found = field_of("train", name)
    assert found is not None and (found.field.name, found.labels) == (entry, labels)


def test_unknown_name_has_no_entry() -> None:
    assert field_of("train", "no_such_field") is None and field_of("no_such_kind", "step") is None
    assert undocumented([{"kind": "train", "stats": {"x": 1}, "y": 2}]) == {"train: stats/x", "train: y"}


def test_numbers_leave_out_texts_lists_and_null() -> None:
    record = {"a": 1, "b": None, "c": "text", "d": [1, 2], "e": {"f": True, "g": {"h": 0.5}}, "i": 10**400}
    assert dict(numbers(record)) == {"a": 1.0, "e/f": 1.0, "e/g/h": 0.5}
    assert set(names(record)) == {"a", "b", "c", "d", "e/f", "e/g/h", "i"}

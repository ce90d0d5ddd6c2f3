"""Published tables: the predicted sign, faster or slower, is that of every published pair; the errors are pinned."""

from __future__ import annotations

from statistics import median

import pytest

from realsys.lab.planner.published import TABLES, Comparison, comparisons, table


@pytest.fixture(scope="module")
def found() -> list[Comparison]:
    return comparisons()


def test_sign_is_right_in_every_pair(found: list[Comparison]) -> None:
    assert [each.name for each in found if not each.sign_is_right] == []
    slower = {each.name for each in found if each.published < 1.0}
    assert slower == {"Qwen2.5-Math-7B, 16 H20", "Qwen3-30B-A3B, 16 GB200"}


def test_errors_are_those_of_the_page(found: list[Comparison]) -> None:
    """Medians in percent, as docs/planning.md reports them."""
    errors = {name: [abs(each.error) for each in found if each.table == name] for name in ("verl", "NeMo-RL", "AReaL")}
    assert {name: round(100 * median(values)) for name, values in errors.items()} == {
        "verl": 41,
        "NeMo-RL": 14,
        "AReaL": 50,
    }


@pytest.mark.parametrize("name", TABLES)
def test_table_names_its_source(name: str) -> None:
    assert table(name)["source"].startswith("https://")

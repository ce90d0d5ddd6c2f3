"""Percentages are rounded as on the status page."""

from __future__ import annotations

import pytest

from realsys.observe.percent import apportioned, percent, percentage, whole_percents


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.8125, 1, "81.3%"),  # (100 * 0.8125).toFixed(1) in a browser
        (0.1875, 1, "18.8%"),
        (0.125, 0, "13%"),
        (-0.0625, 1, "-6.3%"),
        (0.41, 1, "41.0%"),
        (1.0, 0, "100%"),
    ],
)
def test_half_a_unit_is_rounded_up(share: float, digits: int, text: str) -> None:
    assert percent(share, digits) == text


def test_gain_is_that_of_the_shown_numbers() -> None:
    assert f"{percentage(0.9375) - percentage(0.8125):+}" == "+12.5"


def test_percentages_add_up_to_hundred() -> None:
    assert apportioned({"a": 1.0, "b": 1.0, "c": 1.0}, 100) == {"a": 34, "b": 33, "c": 33}
    assert apportioned({"a": 0.004, "b": 0.996}, 100) == {"a": 0, "b": 100}
    assert apportioned({"a": 0.0}, 100) == {}


def test_percentages_of_parts_add_up_to_theirs() -> None:
    assert whole_percents({"a": 1.0, "b": 1.0, "c": 0.0}, 3.0) == {"a": 34, "b": 33, "c": 0}
    assert whole_percents({"a": 0.0}, 0.0) == {"a": 0}

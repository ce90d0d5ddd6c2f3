"""Percentages are rounded as on the status page."""

from __future__ import annotations

import pytest

from realsys.telemetry.percent import percent, percentage


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

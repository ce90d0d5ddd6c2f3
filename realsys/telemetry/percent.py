"""Shares as percentages. All texts of the terminal round them here, and the status page rounds in the same way."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal


def percentage(share: float, digits: int = 1) -> Decimal:
    """Return 100 * ``share`` with ``digits`` decimals. Half a unit is rounded away from 0, as in JavaScript.

    Python's own format rounds it to the even digit: 0.8125 would be 81.2 on the terminal and 81.3 on the page.
    """
    return Decimal(100 * share).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text: `81.3%`."""
    return f"{percentage(share, digits)}%"

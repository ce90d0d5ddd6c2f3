"""Shares as percentages. All texts of the terminal round them here, and the status page rounds in the same way.

``apportioned`` rounds the parts of a whole, so that the shown numbers add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal


def percentage(share: float, digits: int = 1) -> Decimal:
    """Return 100 * ``share`` with ``digits`` decimals. Half a unit is rounded away from 0, as in JavaScript.

    Python's own format rounds it to the even digit: 0.8125 would be 81.2 on the terminal and 81.3 on the page.
    """
    return Decimal(100 * share).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text: `81.3%`."""
    return f"{percentage(share, digits)}%"


def apportioned(amounts: Mapping[str, float], units: int) -> dict[str, int]:
    """Return whole shares of ``units`` that add up to it: the largest remainders are rounded up. {} if all are 0."""
    total = sum(amounts.values())
    if total <= 0:
        return {}
    exact = {name: units * amount / total for name, amount in amounts.items()}
    whole = {name: math.floor(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: units - sum(whole.values())]:
        whole[name] += 1
    return whole


def whole_percents(parts: Mapping[str, float], whole: float) -> dict[str, int]:
    """Return the parts as whole percentages of ``whole``, which add up to the percentage of their sum."""
    units = int(percentage(sum(parts.values()) / whole, 0)) if whole else 0
    return dict.fromkeys(parts, 0) | apportioned(parts, units)

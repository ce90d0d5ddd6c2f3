"""The verifier ``math``: the final answer of the completion equals the reference mathematically."""

from __future__ import annotations

from realsys.reward.mathematics.equality import is_right
from realsys.reward.verifiers.base import Item


def math(item: Item) -> bool:
    """Compare."""
    return is_right(item.completion, item.answer)

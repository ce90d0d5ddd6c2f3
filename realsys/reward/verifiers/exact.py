"""The verifier ``exact``: the text after the only ``#`` is the reference."""

from __future__ import annotations

from realsys.reward.verifiers.base import Item


def exact(item: Item) -> bool:
    """Compare the text after the only ``#`` of the completion with the reference, to the letter."""
    return item.completion.count("#") == 1 and item.completion.partition("#")[2] == item.answer

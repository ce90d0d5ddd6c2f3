"""The verifier ``exact``: the text after the only ``#`` is the reference."""

from __future__ import annotations

from realsys.reward.verifiers.base import Item, Verdict


def exact(item: Item) -> Verdict:
    """Compare the text after the only ``#`` of the completion with the reference, to the letter."""
    if item.completion.count("#") != 1:
        return Verdict(correct=False)
    answer = item.completion.partition("#")[2]
    return Verdict(correct=answer == item.answer, answer=answer)

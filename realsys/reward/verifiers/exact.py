"""The verifier ``exact``: the text after the only ``#`` is the reference."""

from __future__ import annotations

from realsys.reward.verifiers.contract import Item, Verdict, declare


def check_answer(item: Item) -> str | None:
    """Return why no completion can have the reference; None if one can."""
    if "#" in item.answer:
        return "it has a #, and the answer is what follows the only one"
    return "it is a list of texts: give one answer" if item.answer.startswith('["') else None


@declare(check_answer=check_answer)
def exact(item: Item) -> Verdict:
    """Compare the text after the only ``#`` of the completion with the reference, to the letter."""
    if item.completion.count("#") != 1:
        return Verdict(correct=False)
    answer = item.completion.partition("#")[2]
    return Verdict(correct=answer == item.answer, answer=answer)

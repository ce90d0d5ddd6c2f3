"""The verifier ``math``: the final answer of a completion equals the reference (docs/rewards.md#the-verifier-math)."""

from __future__ import annotations

from realsys.reward.final_answers import final_answer, has_format
from realsys.reward.math_equality import check_reference, is_right
from realsys.reward.verifiers.contract import Item, Verdict, declare


def check_answer(item: Item) -> str | None:
    """Return why the reference cannot be used; None if it can."""
    return check_reference(item.answer)


@declare(check_answer=check_answer, wrong_over_limit=True, compares_answers=True)
def math(item: Item, *, format_reward: float = 0.0) -> Verdict:
    """Compare the final answer, behind the thinking part, with the reference.

    ``format_reward`` is added to the reward of a completion that is one thinking part and then an answer in a box.
    Raises ValueError for a reference that is no mathematical expression.
    """
    right = is_right(item.completion, item.answer)
    final = final_answer(item.completion)
    answer = None if final is None or final.alternatives else final.answer
    if not format_reward:
        return Verdict(correct=right, answer=answer)
    formatted = has_format(item.completion)
    return Verdict(None, right, {"format": float(formatted)}, format_reward * formatted, answer)

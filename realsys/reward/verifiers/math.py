"""The verifier ``math``: the completion's value equals the reference mathematically, as math-verify sees it."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from realsys.reward.verifiers.base import Item

# math-verify warns once that its time limit is off.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def math(item: Item) -> bool:
    """Compare the boxed value, else the last expression, of the completion with the reference.

    Raises ValueError for a reference that is no mathematical expression, and whatever the comparison raises.
    """
    reference = item.answer
    boxed = reference if "\\boxed" in reference else f"\\boxed{{{reference.strip().strip('$')}}}"
    # The time limits of math-verify are off: they use SIGALRM, which works in main threads only, and they turn a
    # comparison that takes too long into "wrong". The pool has a limit, too.
    gold = parse(boxed, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"reference answer {reference[:100]!r} is no mathematical expression")
    given = parse(item.completion, parsing_timeout=None, raise_on_error=True)
    return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))

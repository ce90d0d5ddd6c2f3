"""Verifiers: is the model's answer to a prompt right? Each is ``(prompt, answer, reference) -> bool``.

False means the answer is wrong. A verifier that cannot tell raises; it never returns False for that. They run in the
processes of ``pool.py``, which bounds their time and memory.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

Verifier = Callable[[str, str, str], bool]


def exact(prompt: str, answer: str, reference: str) -> bool:
    """What follows the only ``#`` of the answer is the reference, to the letter."""
    return answer.count("#") == 1 and answer.partition("#")[2] == reference


def math(prompt: str, answer: str, reference: str) -> bool:
    """The boxed value, else the last expression, of the answer equals the reference mathematically.

    Raises ValueError for a reference that is no mathematical expression, and whatever the comparison raises.
    """
    # math-verify interrupts itself with SIGALRM, works in main threads only and turns the interrupt into "wrong":
    # switched off. The pool has its own limit.
    from math_verify import parse, verify

    gold_text = reference if "\\boxed" in reference else f"\\boxed{{{reference.strip().strip('$')}}}"
    gold = parse(gold_text, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"reference answer {reference[:100]!r} is no mathematical expression")
    given = parse(answer, parsing_timeout=None, raise_on_error=True)
    return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))


def _load_math() -> Verifier:
    # It warns once that its time limit is off.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    importlib.import_module("math_verify")
    return math


_LOADERS: dict[str, Callable[[], Verifier]] = {"exact": lambda: exact, "math": _load_math}


def load_verifier(name: str) -> Verifier:
    """The verifier called ``name``, or ``package.module:function``. Imports what it needs. Raises ValueError."""
    if name in _LOADERS:
        return _LOADERS[name]()
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"no verifier {name!r}; known: {', '.join(_LOADERS)}, or package.module:function")
    verifier = getattr(importlib.import_module(module), function, None)
    if not callable(verifier):
        raise ValueError(f"verifier {name!r}: {module} has no function {function!r}")
    return verifier  # type: ignore[no-any-return]

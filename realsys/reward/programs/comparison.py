"""Compares the results of a program with those of its tests (docs/sandbox.md has the rules)."""

from __future__ import annotations

import math
import re
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # bounds on the difference of two floats
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def same_output(actual: str, expected: str) -> bool:
    """Compare two outputs, without spaces at the ends of lines and without empty lines at the end.

    A word that is written as a float in the expected output may be another text of about the same number; the
    spaces between words of such a line are free.
    """
    ours, theirs = _lines(actual), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(actual: Any, expected: Any) -> bool:
    """Compare plain data of a program with a JSON value: tuples are lists, keys are text, floats are near."""
    if isinstance(expected, list):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(expected)
            and all(map(same_value, actual, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return False
        keyed = {_key(key): value for key, value in actual.items()}
        same_keys = len(keyed) == len(actual) and keyed.keys() == expected.keys()
        return same_keys and all(same_value(keyed[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(actual, (int, float)) and not isinstance(actual, bool):
        return _near(actual, expected)
    if isinstance(actual, float) and type(expected) is int:
        return _near(actual, expected)
    return type(actual) is type(expected) and bool(actual == expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    ours, theirs = actual.split(), expected.split()
    if len(ours) != len(theirs) or not any(map(_FLOAT.fullmatch, theirs)):
        return False
    return all(map(_same_word, ours, theirs))


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if len(actual) > 100 or not (_FLOAT.fullmatch(expected) and _NUMBER.fullmatch(actual)):
        return False
    return _near(float(actual), float(expected))


def _near(actual: float, expected: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an integer that no float can hold
        return False


def _key(key: Any) -> Any:
    """Return a key as JSON writes it."""
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    if isinstance(key, int) and abs(key) >= 1 << 63:
        return key  # no key of a test; as text it may be too long for Python
    return repr(key) if isinstance(key, (int, float)) else key

"""Rewrites notations that math-verify misreads into ones that it reads. Pure functions on text."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MAX_EXPONENT = 300  # a longer number is left as it is: math-verify does not have to write it out

_SYMBOLS = {
    **dict.fromkeys("−–", "-"),
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "±": r"\pm ",
    "\u00a0": " ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "²": "^2",
    "³": "^3",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
_CHARACTERS = str.maketrans(_SYMBOLS)
_NUMBER = r"(?<![\w.^/\\])(?<![\^_]\{)(\d+(?:\.\d+)?)"
_E_NOTATION = re.compile(_NUMBER + r"[eE]([+-]?\d{1,4})(?![\w^!]|\.\d)")
_EXPONENT = r"(?:\{\s*([+-]?\d{1,4})\s*\}|\(([+-]?\d{1,4})\)|([+-]?\d{1,4}))"
_POWER_OF_TEN = re.compile(
    rf"{_NUMBER}\s*(?:\\times|\\cdot|\*|[xX](?=\s*10))\s*10\s*(?:\^|\*\*)\s*{_EXPONENT}(?![\w^!{{(]|\.\d)"
)
_MIXED = re.compile(r"(?<![\w./^{}])(\d+)\s+(\d+)/(\d+)(?![\w/^.])")
_UNION = re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])")
_ELEMENT = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s+in\s+(?=[(\[{\\])")
_INFINITY = re.compile(r"(?<![A-Za-z\\])oo(?![A-Za-z])")
_BRACES = re.compile(r"^\s*\{([^{}]*)\}\s*$")
_PERCENT = re.compile(
    r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent|percentage|pct)\s*\}|\b(?:percent|percentage|pct))\s*$", re.I
)

_START = r"(?<![\d.,^(\[])(?<!\\\{)"  # not within a number, tuple, interval or set
_GROUPS = re.compile(rf"{_START}\d{{1,3}}(?:(?:\\[,;:! ]|~|[\u2009\u202f\u00a0]|\{{,\}})\d{{3}})+(?!\d)")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_CONTINENTAL = re.compile(rf"{_START}\d{{1,3}}(?:\.\d{{3}})+,\d{{1,3}}(?![\d.,]*\d)")
_OVERLINE = re.compile(r"(?<![\d.,])(\d{1,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*(?:\{(\d{1,20})\}|(\d))(?![\d^])")
_DOTS = re.compile(r"(?<![\d.,])(\d{1,20})\.(\d{0,20}?)(\d{1,6}?)\3{2,20}\s*(?:\\(?:[lc]?dots)\b|\.\.\.|…)")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(
    r"(?<![\w.,/^])(\d+(?:(?:,|\{,\})\d{3})*(?:\.\d+)?)(?:\\[ ,;:!]|[~ ]){0,3}(\\text ?\{ ?)?"
    rf"({'|'.join(_SCALES)})s?\b(?(2)( ?\}})?)",
    re.I,
)
_PERCENT_IN_TEXT = re.compile(r"\\text\s*\{\s*(-?[\d.]+)\s*\\?(?:%|percent)\s*\}")


def rewrite(text: str) -> str:
    """Write symbols as LaTeX, a repeating decimal as a fraction, and other numbers as plain ones: ``1.5e3``,
    ``1.5 \\times 10^3``, ``1\\,500`` and ``1.5 thousand`` as ``1500``.
    """
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _CONTINENTAL.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    text = _OVERLINE.sub(lambda match: _repeating(match[1], match[2], match[3] or match[4]), text)
    text = _DOTS.sub(lambda match: _repeating(match[1], match[2], match[3]), text)
    text = _SCALED.sub(_scaled, text)
    text = text.translate(_CHARACTERS)
    text = _E_NOTATION.sub(lambda match: _plain(match, match[1], match[2]), text)
    return _POWER_OF_TEN.sub(lambda match: _plain(match, match[1], match[2] or match[3] or match[4]), text)


def _plain(match: re.Match[str], digits: str, exponent: str) -> str:
    if abs(int(exponent)) > MAX_EXPONENT or len(digits) > MAX_EXPONENT:
        return match[0]
    return f"{Decimal(digits).scaleb(int(exponent)):f}"


def _repeating(whole: str, once: str, again: str) -> str:
    """Return the fraction of a decimal whose digits ``again`` repeat behind ``once``."""
    value = int(whole) + (Fraction(int(once or 0)) + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(once)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scaled(match: re.Match[str]) -> str:
    """Multiply a number by the word behind it; what follows the word in its ``\\text{...}`` stays there."""
    number, text, word, closed = match.groups()
    if len(number) > MAX_EXPONENT:
        return match[0]
    value = f"{Decimal(re.sub('[^0-9.]', '', number)) * _SCALES[word.lower()]:f}"
    if "." in value:
        value = value.rstrip("0").rstrip(".")
    return value + (rf"{text} " if text and not closed else "")


def tidy_answer(text: str) -> str:
    """Rewrite the text of one answer, without the words around it: mixed numbers, sets and intervals."""
    text = text.strip().removesuffix(".").strip()
    if _SPACED.fullmatch(text):
        return text.replace(" ", "")
    text = mixed_numbers(text)
    text = _UNION.sub(r" \\cup ", text)
    text = _ELEMENT.sub(r"\1 \\in ", text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = text.replace(r"\varnothing", r"\emptyset")
    return _BRACES.sub(r"\\{\1\\}", text)


def mixed_numbers(text: str) -> str:
    """Write ``2 2/3`` as ``8/3``."""
    return _MIXED.sub(_improper, text)


def _improper(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return f"{int(whole) * int(below) + int(above)}/{below}" if int(above) < int(below) else match[0]


def split_percent(text: str) -> tuple[str, bool]:
    """Return the text without a percent sign or word at its end, and True if it had one."""
    if match := _PERCENT_IN_TEXT.fullmatch(text.strip()):
        return match[1], True
    body = _PERCENT.sub("", text)
    return (body, True) if body.strip() and body != text else (text, False)

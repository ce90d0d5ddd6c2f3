"""Compares a completion's final answer with the reference. math-verify parses and compares expressions. This
module chooses the texts that it gets, and compares the classes of answers that it misreads.

    reference ──read_reference──> time of day | expressions in two forms, percent, unit ┐
    completion ──final_answer──> last answer, alternatives, whole text ─────────────────┴─> True or False

A reference is read strictly: one that cannot be read, or that differs from itself, is a ValueError. A completion is
read tolerantly: what cannot be read is not equal.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import get_pct_val

from realsys.reward.final_answers import (
    FinalAnswer,
    Unit,
    boxes,
    final_answer,
    math_letters,
    prose_words,
    rewrite,
    split_percent,
    split_unit,
    tidy_answer,
)

log = logging.getLogger(__name__)
# math-verify warns once that its time limit is off.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_LATEX = LatexExtractionConfig()
_CONFIG = (_LATEX, ExprExtractionConfig())
#: for references with variables: math-verify takes the t of 4t for a unit
_NO_UNITS = (replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False)), _CONFIG[1])
_TINY = 1e-3  # below it math-verify, which rounds to 6 decimals, compares too few digits
_RELATIVE = 1e-6
_DIGITS = 400  # precision of the comparison of exact numbers
_PLAIN = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?|-?\d{1,15}/0*[1-9]\d{0,14}|-?\\d?frac\{\d{1,15}\}\{0*[1-9]\d{0,14}\}")
_VARIABLE = re.compile(r"[A-Za-z]")
_NOT_VARIABLES = re.compile(r"\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?")


@dataclass(frozen=True, slots=True)
class Value:
    """An expression that math-verify has read, or a text that it could not read. ``percent``: it had that sign."""

    expression: Any
    percent: bool = False

    @property
    def is_collection(self) -> bool:
        """Return True for a list, set, interval or system: it is compared as a whole."""
        return isinstance(self.expression, sympy.Set | sympy.Tuple | And)

    @property
    def is_expression(self) -> bool:
        return isinstance(self.expression, sympy.Basic | sympy.MatrixBase)

    @property
    def is_usable(self) -> bool:
        expression = self.expression
        if isinstance(expression, sympy.Basic):
            return not expression.has(sympy.nan, sympy.zoo)
        return not isinstance(expression, str) or bool(expression.strip())


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer. ``config``: how math-verify must read it, and the answers to it."""

    text: str
    values: tuple[Value, ...]
    time: ClockTime | None
    unit: Unit | None
    config: tuple[Any, ...]

    @property
    def is_single(self) -> bool:
        """Return True if the reference is one value; a completion must not offer several then."""
        return not any(value.is_collection for value in self.values)


def is_right(completion: str, reference: str) -> bool:
    """Return True if the final answer of the completion equals the reference. Raises ValueError for a bad reference."""
    expected, final = read_reference(reference), final_answer(completion)
    if final is None:
        return False
    if expected.time is not None and (verdict := _same_time(expected.time, final)) is not None:
        return verdict
    if final.alternatives:
        if expected.is_single:
            return all(_matches(expected, text) for text in final.alternatives)
        if _matches(expected, ", ".join(reversed(final.alternatives))):
            return True
    if final.answer is not None:
        verdict = _same_answer(expected, final)
        if verdict is not None:
            return verdict
    return _any_equal(expected.values, _parse(final.text, expected.config))


@lru_cache(maxsize=256)
def read_reference(text: str) -> Reference:
    """Read a reference in both forms, in a box and between dollars. Raises ValueError."""
    time = read_time(text)
    written = rewrite(text)
    if boxes(written):
        values, unit, config = _parse(written, _CONFIG), None, _CONFIG
    else:
        body, unit = split_unit(tidy_answer(written.strip().strip("$")))
        body, percent = split_percent(body)
        config = _NO_UNITS if _VARIABLE.search(_NOT_VARIABLES.sub("", body)) else _CONFIG
        values = [
            Value(value.expression, percent or value.percent)
            for form in (rf"\boxed{{{body}}}", f"${body}$")
            for value in _parse(form, config)
        ]
    usable = tuple(value for value in values if value.is_usable)
    if time is None and not usable:
        raise ValueError(f"reference answer {text[:100]!r} is no mathematical expression")
    return Reference(text, usable, time, unit, config)


def check_reference(text: str) -> str | None:
    """Return why a reference cannot be used; None if it can.

    It must be an expression, and right as an answer to itself, as it stands and in a box. That is strict on purpose: a
    reference that fails here makes every completion wrong.
    """
    if re.match(r"\[\s*[\"']", text.strip()):
        return "it is a list of texts: give one answer"
    if _PLAIN.fullmatch(text.strip()):  # most references, and it saves 10 ms for each
        return None
    try:
        expected = read_reference(text)
    except ValueError:
        return "it is no mathematical expression"
    if boxes(text):
        return None if is_right(text, text) else "it does not equal itself"
    if expected.time is None:
        if not any(value.is_expression for value in expected.values):
            return "it is no mathematical expression"
        if _is_prose(text):
            return r"it is a text, so write a word as \text{word}"
    body = text.strip().strip("$")
    for form, completion in (("in a box", rf"\boxed{{{body}}}"), ("between dollars", f"${body}$")):
        if not is_right(completion, text):
            return f"it does not equal itself {form}"
    return None


def _is_prose(text: str) -> bool:
    """Return True if the text begins with a word, or has nothing but words. ``abc`` and ``xy`` are products."""
    if "$" in text.strip().strip("$"):  # words around an expression
        return False
    plain = math_letters(re.sub(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?", " ", split_unit(text)[0]))
    if re.search(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}", plain):
        return True
    words = prose_words(plain)
    if not words:
        return False
    return plain.strip().startswith(f"{words[0]} ") or re.search(r"[\d+*/^=<>(\[]", text) is None


def _same_time(expected: ClockTime, final: FinalAnswer) -> bool | None:
    """Compare times of day; None if the answer is none, and the reference may be a ratio."""
    if final.alternatives:
        times = [read_time(text) for text in final.alternatives]
        return all(time is not None and expected.allows(time) for time in times)
    given = read_time(final.answer) if final.answer is not None else None
    if given is None and not final.boxed:
        given = last_time(final.text[-200:])
    if given is None:
        return False if expected.half else None
    return expected.allows(given)


def _same_answer(expected: Reference, final: FinalAnswer) -> bool | None:
    """Compare the answer alone; None if the whole text may say more."""
    assert final.answer is not None
    answer, unit = split_unit(tidy_answer(final.answer))
    if expected.unit is not None and unit is not None and unit != expected.unit:
        assert expected.unit is not None
        if unit.powers != expected.unit.powers:
            return False
        scale = sympy.Rational(unit.size / expected.unit.size)
        read = [value.expression for value in _read_answer(answer, expected.config)]
        given = [Value(expression * scale) for expression in read if _is_number(expression)]
        return _any_equal(expected.values, given)
    values = _read_answer(answer, expected.config)
    brackets = {_brackets(expected.text), _brackets(final.answer)}
    if brackets == {"set", "pair"}:  # math-verify compares their elements only
        return False
    if _any_equal(expected.values, values):
        return True
    if final.boxed:  # math-verify takes any other expression of the text if it cannot read the box
        return None if any(value.is_expression for value in values) else False
    # "1, 2" and "5 x 10" are more than their last number.
    whole = any(value.is_expression for value in values) and not re.search(r"\d[,.]\d", answer)
    return False if whole else None


def _brackets(text: str) -> str | None:
    """Return what the brackets around the elements of a text say: a set, or a pair (also an interval)."""
    match = re.fullmatch(r"(?P<set>\\\{[^(){}\[\]]*\\\})|(?P<pair>\([^(){}\[\]]*,[^(){}\[\]]*\))", text.strip("$ "))
    return match.lastgroup if match else None


def _matches(expected: Reference, text: str) -> bool:
    return _any_equal(expected.values, _read_answer(split_unit(tidy_answer(text))[0], expected.config))


def _read_answer(answer: str, config: tuple[Any, ...]) -> list[Value]:
    body, percent = split_percent(answer)
    return [Value(value.expression, percent or value.percent) for value in _parse(rf"\boxed{{{body}}}", config)]


def _parse(text: str, config: tuple[Any, ...]) -> list[Value]:
    """Have math-verify read a text. Its time limits are off: they use SIGALRM, which works in main threads only, and
    count time on the clock. The limit of the verifier process counts CPU time.
    """
    try:
        parsed = parse(text, config, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception as error:  # the parser's own errors have many types
        log.debug("math-verify cannot read a text: %s", error)
        return []
    values = []
    for expression in parsed:
        if isinstance(expression, sympy.Expr) and {str(symbol) for symbol in expression.free_symbols} == {"i"}:
            expression = expression.subs(dict.fromkeys(expression.free_symbols, sympy.I))  # not a variable
        number = get_pct_val(expression) if isinstance(expression, sympy.Basic) else None
        values.append(Value(expression) if number is None else Value(number, percent=True))
    return values


def _any_equal(expected: Iterable[Value], given: list[Value]) -> bool:
    return any(_equal_values(value, other) for value in expected for other in given if other.is_usable)


def _equal_values(expected: Value, given: Value) -> bool:
    """Compare two values. 50 % equal 0.5, and equal 50 if one side leaves out the sign."""
    first, second = expected.expression, given.expression
    if expected.percent == given.percent:
        return _equal(first, second)
    if not (_is_number(first) and _is_number(second)):
        return False
    if expected.percent:
        return _equal(first, second) or _equal(first / 100, second)
    # A reference below 1 is a share: 0.5 is not 0.5 %.
    return _equal(first, second / 100) or (abs(float(first)) >= 1 and _equal(first, second))


def _equal(expected: Any, given: Any) -> bool:
    try:
        if _is_number(expected) and _is_number(given) and (verdict := _equal_numbers(expected, given)) is not None:
            return verdict
        return bool(verify([expected], [given], timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception as error:  # the comparison's own errors have many types
        log.debug("math-verify cannot compare two expressions: %s", error)
        return False


def _equal_numbers(expected: sympy.Expr, given: sympy.Expr) -> bool | None:
    """Compare numbers that math-verify rounds to 6 decimals: exact ones, and those close to 0 by their leading digits.
    None for others.
    """
    if not (expected.is_real and given.is_real):
        return None
    difference = abs((expected - given).evalf(15, maxn=_DIGITS))
    if not isinstance(difference, sympy.Number) or expected == 0:  # math-verify simplifies other forms of 0
        return None
    if not (expected.has(sympy.Float) or given.has(sympy.Float)):
        return bool(difference <= abs(expected.evalf(15)) * sympy.Float(10) ** (-_DIGITS // 2))
    size = abs(expected.evalf(15))
    return bool(difference <= _RELATIVE * size) if 0 < size < _TINY else None


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and expression.is_number is True


# ---- times of day: ``12:00``, ``4:30 p.m.``, ``noon``
#
# math-verify takes them for ratios, and raises for ``12:00``.


HALF_DAY_S = 12 * 3600

_MARKUP = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|rm)\b\s*|\\[,;!:> ]|[{}~$*]|\\[()\[\]]")
_SUFFIX = r"(?:\s*(?P<half>[ap])\.?\s?m\b\.?|\s*(?P<word>noon|midnight)\b)?"
_TIME = re.compile(
    rf"(?<![\d:.])(?P<hour>\d{{1,2}})\s*:\s*(?P<minute>\d{{2}})(?::(?P<second>\d{{2}}))?(?![\d:]){_SUFFIX}"
    r"|(?<![\d:.])(?P<only>\d{1,2})\s*(?P<only_half>[ap])\.?\s?m\b\.?"
    r"|\b(?P<alone>noon|midnight)\b",
    re.I,
)


@dataclass(frozen=True, slots=True)
class ClockTime:
    """A time of day. ``half``: its text says which half of the day it means."""

    seconds: int  # since midnight
    half: bool

    def allows(self, other: ClockTime) -> bool:
        """Return True if ``other`` is the same time; if this one leaves the half of the day open, in either half."""
        if other.half and not self.half:
            return (self.seconds - other.seconds) % HALF_DAY_S == 0
        return self.seconds == other.seconds


def read_time(text: str) -> ClockTime | None:
    """Return the time of day that is the whole text, or None."""
    text = _clean(text).removeprefix("at ").strip()
    match = _TIME.fullmatch(text.removesuffix(".").strip()) or _TIME.fullmatch(text)
    return _time(match) if match else None


def last_time(text: str) -> ClockTime | None:
    """Return the last time of day in the text, or None."""
    times = [time for match in _TIME.finditer(_clean(text)) if (time := _time(match))]
    return times[-1] if times else None


def _clean(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text.replace("{:}", ":")).split())


def _time(match: re.Match[str]) -> ClockTime | None:
    if alone := match["alone"]:
        return ClockTime(HALF_DAY_S if alone.lower() == "noon" else 0, half=True)
    hour, minute, second = int(match["hour"] or match["only"]), int(match["minute"] or 0), int(match["second"] or 0)
    half = (match["half"] or match["only_half"] or "").lower()
    if word := match["word"]:
        half = "p" if word.lower() == "noon" else "a"
    if minute > 59 or second > 59 or hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "p")
    # 13:00 to 24:00, and 0:00, can only be meant on a clock of 24 hours.
    return ClockTime((hour * 3600 + minute * 60 + second) % (2 * HALF_DAY_S), bool(half) or hour > 12 or hour == 0)

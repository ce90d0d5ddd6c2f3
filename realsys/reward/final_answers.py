"""Finds the final answer in a completion: behind the thinking part, in the last box or the last statement.

    completion ──after_thinking──> text ──┬─ has boxes ──> content of the last one
                                          └─ else ───────> what the last statement ends with
                                    either may offer alternatives ("6 or 7"): a hedged answer

Pure functions on text. Values are compared elsewhere (``equality.py``).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

THINK, END_OF_THINK = "<think>", "</think>"
_TAIL = 400  # characters at the end that may hold the last statement

_TAG = re.compile(r"<answer>(?P<content>(?:(?!<answer>).)*?)</answer>", re.S | re.I)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL_ANSWER = re.compile(r"(?i)final answer\b.{0,100}?\bis\b", re.S)
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$|\*\*|\\(?:quad|qquad|,|;)|\\!\s*|\\text\s*\{([^{}]*)\}")
_OR = (
    r"(?:(?:or|and/or|maybe|perhaps|possibly|alternatively)\b|but\s+(?:it\s+)?(?:could|might|may)\s+(?:also\s+)?be\b)"
    r"(?:[\s,]+(?:or|maybe|perhaps|possibly|even|also|it(?:'s|\s+is|\s+(?:could|might|may)\s+be)))*"
)
_BETWEEN = re.compile(rf"\W*{_OR}\W*", re.I)
#: a word with a digit; its parts are possessive, so that a long one takes no quadratic time
_TOKEN = r"(?<![\w.])(?:[A-Za-z]\s*=\s*)?(?=\S*\d)[\w\\{}^/.,:%+*()\[\]-]++"
_TWO = re.compile(
    rf"(?P<first>{_TOKEN})\s*[,;.?!(]*\s*(?:{_OR}|and|by)\s+(?P<second>{_TOKEN})"
    r"(?:\s+[A-Za-z]+(?:\^\d)?){0,3}[\s.!?)]*$",
    re.I,
)
_NEXT = re.compile(rf"^[\s.,;(\\$)\]*]*{_OR}[\s$\\(]+(?P<second>\\boxed\s*\{{[^{{}}]*\}}|{_TOKEN})", re.I)
_NOT = re.compile(rf",?\s+(?:and\s+|but\s+)?not\s+{_TOKEN}[\s.!]*$", re.I)
#: several numbers that are one value or several, but not the last of them
_COMPOSITE = re.compile(r"(?<![\w.,])[-+]?\d[\d.,]*(?:\s*(?:\\times|\\cdot|[*x:/^])\s*\d[\d.,]*)+$")
_QUANTITY = re.compile(r"(?<![\w./])[-+]?\d[\d.,]*(?:/\d+)?\s+[A-Za-z][A-Za-z^\d/]*(?:\s+per\s+[A-Za-z]+)?$")
_ANCHOR = re.compile(r"(?i)\banswers?\b(?:\s+(?:is|are)|\s*[:=])")
_VERB = re.compile(
    r"(?i).*\b(?:is|are|be|equals?|gives?|get|answers?\s*:|solutions?\s*:|answer\s*=)(?![A-Za-z])[\s:]*", re.S
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_MATH_WORDS = re.compile(
    r"(?i)(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|inf|infinity|oo|and|or|in|mod"
    r"|percent|pct|percentage)(?![A-Za-z])"
)
_WORD = re.compile(r"[A-Za-z]{2,}")
#: words whose letters are in the order of the alphabet, like those of a product of variables
_ORDERED_WORDS = frozenset(
    "all am an any as at be by do first for go how in is it its lost most my no not now or".split()  # noqa: SIM905
)
_LONGEST_BARE = 200  # characters of an answer without a box
_LONGEST = 2000  # characters of an answer that are rewritten; math-verify reads a longer one as it stands


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The final answer of a completion.

    text          behind the thinking part, in LaTeX notation
    answer        text of the answer alone, with its unit or percent sign; None if the words around it hide its end
    boxed         it is in a box
    alternatives  values that it offers by "or", "maybe" and the like; empty if it commits itself
    """

    text: str
    answer: str | None
    boxed: bool
    alternatives: list[str] = field(default_factory=list)


def after_thinking(completion: str) -> str | None:
    """Return what follows the thinking part; None if that has not ended. Without such a part, all of the completion."""
    if END_OF_THINK in completion:
        return completion.rpartition(END_OF_THINK)[2]
    return None if THINK in completion else completion


def has_format(completion: str) -> bool:
    """Return True for one thinking part at the start, then an answer in a box.

    A chat template may have opened the thinking part in the prompt.
    """
    thought, end, answer = completion.partition(END_OF_THINK)
    thought = thought.strip().removeprefix(THINK)
    tags = thought + answer
    return bool(end and thought.strip() and THINK not in tags and END_OF_THINK not in tags and boxes(answer))


def final_answer(completion: str) -> FinalAnswer | None:
    """Return the final answer; None if the completion has no final answer."""
    text = after_thinking(completion)
    if text is None or not text.strip():
        return None
    text = _without_tag(rewrite(text))
    found = boxes(text)
    if not found:
        return _unboxed(text)
    last = found[-1]
    if _FINAL_ANSWER.search(text, last.end):
        return FinalAnswer(text, None, boxed=False)
    answer = last.content.strip("* ") + _suffix(text[last.end :]) if len(last.content) <= _LONGEST else None
    last = found[-1]
    alternatives = [last.content]
    for before, after in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        between = _DELIMITERS.sub(_plain, text[before.end : after.start])
        if not _BETWEEN.fullmatch(between):
            break
        alternatives.append(before.content)
    rest = _DELIMITERS.sub(_plain, text[last.end :])
    if match := _NEXT.match(rest):
        alternatives.append(_trimmed(match["second"]))
    return FinalAnswer(text, answer, True, alternatives if len(alternatives) > 1 else [])


def _without_tag(text: str) -> str:
    """Return the content of the last ``<answer>`` tag, in a box if it is an answer alone; else the text as it is."""
    tags = list(_TAG.finditer(text))
    if not tags or _BOX.search(text, tags[-1].end()):
        return text
    content = tags[-1]["content"].strip()
    return rf"\boxed{{{content}}}" if not boxes(content) and _is_bare(split_unit(content.strip("$"))[0]) else content


@dataclass(frozen=True, slots=True)
class AnswerBox:
    """A ``\\boxed{...}`` in a text."""

    start: int
    end: int
    content: str


def boxes(text: str) -> list[AnswerBox]:
    """Return the boxes that are closed, in their order; one inside of another is part of its content."""
    found: list[AnswerBox] = []
    at = 0
    while match := _BOX.search(text, at):
        end = _closing_brace(text, match.end())
        if end is None:
            break
        found.append(AnswerBox(match.start(), end + 1, text[match.end() : end]))
        at = end + 1
    return found


def _plain(match: re.Match[str]) -> str:
    """Return what a delimiter or a space of LaTeX is in plain text; ``1,\\!000`` is one number."""
    return "" if match[0].startswith("\\!") else match[1] or " "


def _closing_brace(text: str, at: int) -> int | None:
    depth = 1
    for match in re.compile(r"\\[{}]|[{}]").finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return None


def _suffix(rest: str) -> str:
    """Return the percent sign or unit that follows a box."""
    rest = _DELIMITERS.sub(_plain, rest[:40]).strip()
    if match := re.match(r"(?:\\?%|(?:percent|percentage|pct)\b)", rest):
        return r"\%" if match else ""
    words = re.match(r"[A-Za-z][A-Za-z/^\d ]*", rest)
    for count in range(min(4, len(words[0].split())) if words else 0, 0, -1):
        assert words is not None
        phrase = " ".join(words[0].split()[:count])
        if split_unit(f"1 {phrase}")[1] is not None:
            return rf"\text{{ {phrase}}}"
    return ""


def _unboxed(text: str) -> FinalAnswer:
    text = mixed_numbers(text)
    tail = _DELIMITERS.sub(_plain, text[-_TAIL:].strip())
    sentences = [sentence for sentence in _SENTENCE.split(tail) if sentence.strip()]
    if not sentences:
        return FinalAnswer(text, None, boxed=False)
    last = _NOT.sub("", sentences[-1])
    if last != sentences[-1]:
        text = text[:-_TAIL] + tail.removesuffix(sentences[-1]) + last
    if re.match(rf"\W*{_OR}", last, re.I) and len(sentences) > 1:
        last = f"{sentences[-2]} {last}"
    return FinalAnswer(text, _bare(last), False, _alternatives(last))


def _alternatives(sentence: str) -> list[str]:
    match = _TWO.search(sentence)
    if match is None:
        return []
    anchors = list(_ANCHOR.finditer(sentence, 0, match.start()))
    # "The answer is 7, as it is not 2 or 3": another answer precedes the two.
    if anchors and re.search(r"\d", sentence[anchors[-1].end() : match.start()]):
        return []
    return [_trimmed(match["second"]), _trimmed(match["first"])]


def _trimmed(token: str) -> str:
    """Return a word without the punctuation of its sentence."""
    token = token.rstrip(".,;:")
    return token[:-1] if token.count(")") > len(re.findall(r"[(\[]", token)) else token


def _bare(sentence: str) -> str | None:
    """Return the mathematical text that is the whole sentence, or that follows its last verb; None if it has other
    words. A number with a known unit at the end counts, too.
    """
    for text in (sentence, _VERB.sub("", sentence, count=1)):
        answer = text.strip().rstrip(".!").strip()
        if answer and _is_bare(split_unit(answer)[0]):
            return answer
    sentence = sentence.strip().rstrip(".!").strip()
    if composite := _COMPOSITE.search(sentence):
        return composite[0]
    quantity = _QUANTITY.search(sentence)
    return quantity[0] if quantity and split_unit(quantity[0])[1] is not None else None


def math_letters(text: str) -> str:
    """Return the text without the names of commands and functions. Its other letters are variables or words."""
    return _MATH_WORDS.sub(" ", _COMMAND.sub(" ", text))


def prose_words(text: str) -> list[str]:
    """Return the words of a text; ``xy`` and ``abc`` are products of variables."""
    return [w for w in _WORD.findall(text) if w.lower() in _ORDERED_WORDS or list(w) != sorted(w)]


def _is_bare(text: str) -> bool:
    if not text or len(text) > _LONGEST_BARE:
        return False
    rest = math_letters(text)
    if re.fullmatch(r"\W*[A-Za-z]\W*", rest):
        return True
    return not prose_words(rest) or (" " not in text and re.search(r"[\d+*/^=-]", text) is not None)


# ---- notations that math-verify misreads


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
    text = _E_NOTATION.sub(lambda match: _plain_text(match, match[1], match[2]), text)
    return _POWER_OF_TEN.sub(lambda match: _plain_text(match, match[1], match[2] or match[3] or match[4]), text)


def _plain_text(match: re.Match[str], digits: str, exponent: str) -> str:
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


# ---- units at the end of an answer
#
# math-verify removes them, so that to it 5 cm are 5 m; here 5 cm are 50 mm.


_SAME = {
    ("length", "1"): "m meter meters metre metres",
    ("length", "1/100"): "cm centimeter centimeters centimetre centimetres",
    ("length", "1/1000"): "mm millimeter millimeters millimetre millimetres",
    ("length", "1000"): "km kilometer kilometers kilometre kilometres",
    ("length", "0.0254"): "in inch inches",
    ("length", "0.3048"): "ft foot feet",
    ("length", "0.9144"): "yd yard yards",
    ("length", "1609.344"): "mi mile miles",
    ("mass", "1"): "kg kilogram kilograms",
    ("mass", "1/1000"): "g gram grams",
    ("mass", "1/1000000"): "mg milligram milligrams",
    ("mass", "0.45359237"): "lb lbs pound pounds £ GBP",  # a pound is either
    ("mass", "0.028349523125"): "oz ounce ounces",
    ("time", "1"): "s sec secs second seconds",
    ("time", "1/1000"): "ms millisecond milliseconds",
    ("time", "60"): "min mins minute minutes",
    ("time", "3600"): "h hr hrs hour hours",
    ("time", "86400"): "day days",
    ("time", "604800"): "week weeks",
    ("volume", "1/1000"): "L l liter liters litre litres",
    ("volume", "1/1000000"): "mL ml milliliter milliliters",
    ("volume", "0.003785411784"): "gal gallon gallons",
    ("volume", "0.000946352946"): "qt quart quarts",
    ("volume", "0.000473176473"): "pt pint pints",
    ("money", "1"): "dollar dollars USD $",
    ("money", "1/100"): "cent cents ¢",
    ("euro", "1"): "euro euros EUR €",
    ("yen", "1"): "yen yuan JPY CNY RMB ¥",  # the sign means both
    ("rupee", "1"): "rupee rupees INR ₹",
    ("force", "1"): "N newton newtons",
    ("energy", "1"): "J joule joules",
    ("power", "1"): "W watt watts",
    ("pressure", "1"): "Pa pascal pascals",
    ("frequency", "1"): "Hz hertz",
    ("temperature", "1"): "K kelvin",
}
#: name -> (quantity, size in the first unit of the quantity)
_UNITS = {name: (quantity, Fraction(size)) for (quantity, size), names in _SAME.items() for name in names.split()}
_SPEEDS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"}

_WRAPPED = r"\\(?:text|mbox|mathrm|textrm|textbf|textit|textnormal)\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_SPACE = r"(?:\\[ ,;:!]|~|\s)"
_IN_TEXT = re.compile(rf"(?<=[\d)\]}}]){_SPACE}*(?P<unit>{_WRAPPED}(?:{_SPACE}*(?:/|\\cdot)?{_SPACE}*{_WRAPPED})*)\.?$")
_IN_WORDS = re.compile(rf"(?<=[\d)\]}}]){_SPACE}+(?P<unit>[A-Za-z][A-Za-z^\d/*. ]*?)\.?$")
_GLUED = re.compile(r"(?<=\d)(?P<unit>[A-Za-z]{2,}[A-Za-z^\d/]*|m/s(?:\^2)?)$")
_SIGN = re.compile(r"^(?P<minus>[-+]?)\s*(?:\\text\s*\{\s*)?\\?(?P<unit>[$£€¥₹])\s*\}?\s*(?=[-\d.\\(])")
_SIGN_BEHIND = re.compile(r"(?<=[\d)}])\s*(?:\\text\s*\{\s*)?\\?(?P<unit>[$£€¥₹¢])\s*\}?$")
_FACTOR = re.compile(r"(?P<name>[A-Za-z]+|[$£€¥₹¢])(?:\^(?P<power>-?\d))?$")
_AREA = re.compile(r"^(?:square|sq\.?|cubic|cu\.?)\s+", re.I)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: ``powers`` of its quantities, and its ``size`` in their first units."""

    powers: frozenset[tuple[str, int]]
    size: Fraction


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Return the answer without the unit at its end, and the unit; None without a known unit.

    Words that name something else (``\\text{ square units}``, ``\\text{ apples}``) are removed, too. A single letter
    that follows a digit directly is a variable.
    """
    text = text.strip()
    if match := _SIGN.match(text):
        return match["minus"] + text[match.end() :], read_unit(match["unit"])
    if match := _SIGN_BEHIND.search(text):
        return text[: match.start()], read_unit(match["unit"])
    if match := _IN_TEXT.search(text):
        unit = read_unit(match["unit"])
    elif (match := _IN_WORDS.search(text) or _GLUED.search(text)) is None or (unit := read_unit(match["unit"])) is None:
        return text, None
    return text[: match.start()].strip(), unit


def read_unit(text: str) -> Unit | None:
    """Read a unit such as ``cm``, ``m/s^2``, ``square feet`` or ``miles per hour``; None for anything else."""
    text = re.sub(r"\\(?:text|mbox|mathrm|textrm|textbf|textit|textnormal)\s*|[{}.]|\\[ ,;:!]|~", " ", text)
    text = re.sub(r"\s*\^\s*", "^", re.sub(r"\s+per\s+", "/", text.replace(r"\cdot", "*"))).strip()
    prefix = _AREA.match(text)
    text = _SPEEDS.get(text, text[prefix.end() :] if prefix else text)
    powers: Counter[str] = Counter()
    size = Fraction(1)
    for number, part in enumerate(text.split("/")):
        for factor in re.split(r"[\s*]+", part.strip()):
            match = _FACTOR.match(factor)
            if match is None or match["name"] not in _UNITS:
                return None
            quantity, factor_size = _UNITS[match["name"]]
            power = int(match["power"] or 1) * (-1 if number else 1)
            if prefix and not number:
                power *= 2 if prefix[0][0] in "sS" else 3
            powers["length" if quantity == "volume" else quantity] += power * (3 if quantity == "volume" else 1)
            size *= factor_size**power
    return Unit(frozenset((quantity, power) for quantity, power in powers.items() if power), size)

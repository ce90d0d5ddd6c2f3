"""Units at the end of an answer. math-verify removes them, so that to it 5 cm are 5 m; here 5 cm are 50 mm."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

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

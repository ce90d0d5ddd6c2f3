"""Times of day: ``12:00``, ``4:30 p.m.``, ``noon``. math-verify takes them for ratios, and raises for ``12:00``."""

from __future__ import annotations

import re
from dataclasses import dataclass

HALF_DAY_S = 12 * 3600

_LATEX = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|rm)\b\s*|\\[,;!:> ]|[{}~$*]|\\[()\[\]]")
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
    return " ".join(_LATEX.sub(" ", text.replace("{:}", ":")).split())


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

"""Notations that are rewritten before math-verify reads them, times of day and units."""

import pytest

from realsys.reward.final_answers import read_unit, rewrite, split_percent, split_unit, tidy_answer
from realsys.reward.math_equality import last_time, read_time


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1.5e3", "1500"),
        ("-2E-2", "-0.02"),
        (r"3 \times 10^{4}.", "30000."),
        ("x^2 e3 2e", "x^2 e3 2e"),
        (r"x^2 \times 10^3", r"x^2 \times 10^3"),
        ("1e9999", "1e9999"),
        (r"2 \times 10^{3}!", r"2 \times 10^{3}!"),
    ],
)
def test_scientific_notation_is_written_out(text, written):
    assert rewrite(text) == written


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        ("1 3/4", "7/4"),
        ("2 5/4", "2 5/4"),
        ("{1,2}", r"\{1,2\}"),
        ("x in [0,1]", r"x \in [0,1]"),
        ("5.", "5"),
        ("1 000", "1000"),
    ],
)
def test_answer_is_tidied(text, tidied):
    assert tidy_answer(text) == tidied


def test_percent_sign_or_word_is_split():
    assert split_percent(r"50 \%") == ("50", True) and split_percent("5 percent") == ("5", True)
    assert split_percent("50") == ("50", False) and split_percent("%") == ("%", False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00", 43200),
        (r"\text{4:30 p.m.}", 59400),
        ("12:15 AM", 900),
        ("midnight", 0),
        ("24:00", 0),
        ("1:02:03", 3723),
        ("25:00", None),
        ("13:00 pm", None),
        ("2:3", None),
        ("5", None),
    ],
)
def test_time_of_day_is_read(text, seconds):
    time = read_time(text)
    assert (time.seconds if time else None) == seconds


def test_last_time_counts():
    time = last_time("From 3:00 p.m. to 4:30 p.m. it rained")
    assert time is not None and time.seconds == 59400


@pytest.mark.parametrize(
    ("text", "body", "unit"),
    [
        (r"5\text{ cm}", "5", "cm"),
        (r"9.8\,\mathrm{m/s^2}", "9.8", "m/s^2"),
        ("60 miles per hour", "60", "mph"),
        ("3 square feet", "3", "ft^2"),
        (r"15\mbox{ cm}^2", "15", "cm^2"),
        ("5cm", "5", "cm"),
        ("4t", "4t", None),
        (r"\text{even}", r"\text{even}", None),
        (r"12 \text{ apples}", "12", None),
        ("6 or 7", "6 or 7", None),
    ],
)
def test_unit_is_split_from_answer(text, body, unit):
    assert split_unit(text) == (body, read_unit(unit) if unit else None)


def test_units_of_one_quantity_differ_in_size():
    assert read_unit("km/h").powers == read_unit("m/s").powers != read_unit("m").powers
    assert read_unit("L") == read_unit("cubic m").__class__(read_unit("m^3").powers, read_unit("L").size)
    assert read_unit("furlongs") is None

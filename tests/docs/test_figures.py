"""Measured figures of the pages are those of benchmarks/results; other generated tables are those of the code."""

import re

import pytest

from tests.support.docs import figures

README, PERFORMANCE = figures.ROOT / "README.md", figures.ROOT / "docs" / "performance.md"
PAGES = sorted(figures.pages())
#: A measured number in a sentence: a decimal, or a number with a unit of measurement.
MEASURED = re.compile(r"(?<![\w.])\d+\.\d+|\d[\d,]*( ?%| x\b|-fold| ?[kMG]i?B| ?[mµ]?s\b| (tokens|requests|steps)/)")
#: Numbers that are not results, in the words of the page.
GIVEN = (
    *("Python 3.11 to 3.13", "Python 3.11", "Apache 2.0", "Qwen2 1.5B", "temperature 1 "),
    *("exponent of 1.1", "exponent 1.1", "length^-1.5", "goal of 50 ms"),
)


def without_given(page):
    """Return the page without figures from results, figures of the paper, and ``GIVEN``."""
    page = figures.without_figures(re.sub(r"[\d.]+<!-- paper -->", "", page))
    for words in GIVEN:
        page = page.replace(words, "")
    return page


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_has_the_figures_of_the_results(path):
    page = path.read_text("utf-8")
    assert page == figures.rewrite(page), "run `make docs`"


@pytest.mark.parametrize("path", [README, PERFORMANCE], ids=lambda path: path.name)
def test_every_measured_number_has_a_source(path):
    page = without_given(path.read_text("utf-8"))
    assert [match[0] for match in MEASURED.finditer(page)] == []

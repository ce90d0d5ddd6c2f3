"""Measured figures of the pages are those of benchmarks/results; other generated tables are those of the code."""

import re

import pytest

from tests.support.docs import figures
from tests.support.docs.figure_tables import TABLES

README, PERFORMANCE = figures.ROOT / "README.md", figures.ROOT / "docs" / "performance.md"
PAGES = sorted(figures.pages())
#: A measured number in a sentence: a decimal, or a number with a unit of measurement.
MEASURED = re.compile(r"(?<![\w.])\d+\.\d+|\d[\d,]*( ?%| x\b|-fold| ?[kMG]i?B| ?[mµ]?s\b| (tokens|requests|steps)/)")
#: Numbers that are not results, in the words of the page.
GIVEN = (
    *("Python 3.11 to 3.13", "Python 3.11", "Apache 2.0", "Qwen2 1.5B", "temperature 1 "),
    *("exponent of 1.1", "exponent 1.1", "length^-1.5", "goal of 50 ms"),
)


def without_given(page: str) -> str:
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


@pytest.mark.parametrize("name", sorted(TABLES))
def test_changed_character_of_a_table_is_found(name):
    """Changing the last letter or digit of the table changes the page, and the rewrite restores it."""
    made = TABLES[name]()
    page = f"<!-- figures: {name} -->\n\n{made}\n\n{figures.END}"
    last = max(index for index, char in enumerate(page[: -len(figures.END)]) if char.isalnum())
    changed = page[:last] + ("1" if page[last] == "0" else "0") + page[last + 1 :]
    assert figures.rewrite(page) == page != changed
    assert figures.rewrite(changed) == page


def test_changed_figure_of_a_row_is_found():
    rows = "| what | result |\n| --- | --- |\n| pause | {weights[what=pause].seconds*1000:.0f} ms |"
    page = figures.rewrite(f"<!-- figures of these rows:\n{rows}\n-->\n\n{figures.END}")
    assert "| pause | 5 ms |" in page
    assert figures.rewrite(page) == page == figures.rewrite(page.replace("5 ms", "6 ms"))


def test_number_without_source_is_found():
    for sentence in ("it is 3 % slower", "a gain of 1.75", "in 12 ms", "at 6 GB/s", "5 x as fast"):
        assert MEASURED.search(without_given(sentence)), sentence


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("weights[what=pauze].seconds:.1f", "0 rows fit"),
        ("weights.seconds:.1f", "rows fit, expected 1"),
        ("weights", "cannot be read"),
    ],
)
def test_expression_without_figure_is_refused(expression, problem):
    with pytest.raises(ValueError, match=problem):
        figures.figure(expression)

"""Filters of samples, and the bound of a search."""

from __future__ import annotations

import itertools

import pytest

from realsys.errors import ConfigError
from realsys.observe.samples.filters import Filter, SampleRow, SampleView, choose

ROWS = [
    SampleRow("a/0", "a", 1, 1.0, True, 10, staleness=0, advantage=0.5),
    SampleRow("a/1", "a", 1, 0.0, False, 40, truncated=True, finish_reason="length", staleness=3, advantage=-0.9),
    SampleRow("b/0", "b", 2, 0.5, None, 20, staleness=1),
    SampleRow("c/0", "c", 3, None, None, 5, outcome="failed"),
]


class Rows:
    title = "rows"

    def rows(self) -> list[SampleRow]:
        return ROWS

    def text(self, sample_id: str) -> str:
        return f"The ANSWER of {sample_id}"

    def view(self, sample_id: str) -> SampleView:
        raise AssertionError("a list needs no tokens")


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({}, ["a/0", "a/1", "b/0", "c/0"]),
        ({"verdict": "wrong"}, ["a/1"]),
        ({"verdict": "correct"}, ["a/0"]),
        ({"verdict": "unjudged"}, ["b/0", "c/0"]),
        ({"truncated": "1"}, ["a/1"]),
        ({"reward_min": "0.5"}, ["a/0", "b/0"]),
        ({"reward_min": "0", "reward_max": "0.5"}, ["a/1", "b/0"]),
        ({"stale_min": "1", "stale_max": "2"}, ["b/0"]),
        ({"tokens_min": "20"}, ["a/1", "b/0"]),
        ({"text": "answer of A"}, ["a/0", "a/1"]),
        ({"group": "b"}, ["b/0"]),
        ({"order": "longest"}, ["a/1", "b/0", "a/0", "c/0"]),
        ({"order": "shortest", "limit": "1"}, ["c/0"]),
        ({"order": "reward"}, ["a/1", "b/0", "a/0", "c/0"]),
        ({"order": "stalest", "offset": "1", "limit": "1"}, ["b/0"]),
        ({"order": "advantage"}, ["a/1", "a/0", "b/0", "c/0"]),
    ],
)
def test_filter_chooses_and_orders(query: dict[str, str], ids: list[str]) -> None:
    found = choose(Rows(), Filter.of(query))
    assert [row.sample_id for row in found.rows] == ids and found.total == 4


def test_search_ends_in_time_and_says_so() -> None:
    ticks = itertools.count()
    found = choose(Rows(), Filter(text="answer"), lambda: float(next(ticks)), seconds=2.5)
    assert (found.searched, found.unsearched, found.matched) == (2, 2, 2)


@pytest.mark.parametrize(
    "query",
    [
        {"order": "best"},
        {"reward_min": "x"},
        {"limit": "99999"},
        {"limit": "0"},
        {"offset": "-1"},
        {"verdict": "maybe"},
    ],
)
def test_bad_filter_is_named(query: dict[str, str]) -> None:
    [(field, value)] = query.items()
    with pytest.raises(ConfigError, match=f"config: {field}='?{value}'?: "):
        Filter.of(query)

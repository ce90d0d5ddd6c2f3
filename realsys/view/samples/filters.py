"""Filters of samples, as the page and `realsys samples` use them. Pure: the clock is an argument.

The metadata are filtered first. Only samples that pass are searched for a text, because a search reads their tokens. It
ends after ``seconds``; then the result has the number of samples that were not searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import msgspec

from realsys.errors import ConfigError
from realsys.view.samples.base import SampleRow, SampleSource

Verdict = Literal["any", "correct", "wrong", "unjudged"]
Order = Literal["source", "longest", "shortest", "reward", "stalest", "advantage"]

SEARCH_S = 3.0
PAGE_SAMPLES = 100
MOST_SAMPLES = 1000  # most samples in one answer
_VERDICTS: dict[str, bool | None] = {"correct": True, "wrong": False, "unjudged": None}


class Filter(msgspec.Struct, frozen=True):
    """Samples to choose, and their order. Bounds include their ends; None: no bound.

    text   part of prompt or completion; small and capital letters are equal
    group  id of a ticket, or number of a problem
    limit  samples of one page; 0: all, which a request cannot ask for
    """

    verdict: Verdict = "any"
    truncated: bool = False
    reward_min: float | None = None
    reward_max: float | None = None
    stale_min: int | None = None
    stale_max: int | None = None
    tokens_min: int | None = None
    text: str = ""
    group: str = ""
    order: Order = "source"
    offset: int = 0
    limit: int = PAGE_SAMPLES

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Read the parameters of a request; unknown ones are ignored. Raises ConfigError for a bad value."""
        fields: dict[str, Any] = {name: query[name] for name in cls.__struct_fields__ if query.get(name, "") != ""}
        if "truncated" in fields:
            fields["truncated"] = fields["truncated"] in ("1", "true")
        try:
            made = msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            field = str(error).rpartition("`$.")[2].strip("`") or "filter"
            choices = {"verdict": get_args(Verdict), "order": get_args(Order)}.get(field)
            problem = f"use one of {', '.join(choices)}" if choices else str(error).partition(" - ")[0]
            raise ConfigError(field, fields.get(field, ""), problem) from None
        if made.offset < 0:
            raise ConfigError("offset", made.offset, "must be 0 or more")
        if not 1 <= made.limit <= MOST_SAMPLES:
            raise ConfigError("limit", made.limit, f"must be 1 to {MOST_SAMPLES}")
        return made

    def admits(self, row: SampleRow) -> bool:
        """Return True if the metadata of a sample pass."""
        return (
            (self.verdict == "any" or row.correct is _VERDICTS[self.verdict])
            and (row.truncated or not self.truncated)
            and _within(row.reward, self.reward_min, self.reward_max)
            and _within(row.staleness, self.stale_min, self.stale_max)
            and _within(row.tokens, self.tokens_min, None)
            and self.group in ("", row.group)
        )


class Found(msgspec.Struct, frozen=True):
    """Result of a filter.

    rows      one page of the samples that pass
    total     samples of the source
    matched   samples that pass, of those that were searched
    searched  samples whose text was searched; ``unsearched``: the search ended before these
    """

    rows: list[SampleRow]
    total: int
    matched: int
    searched: int = 0
    unsearched: int = 0


def choose(
    source: SampleSource, wanted: Filter, clock: Callable[[], float] = lambda: 0.0, seconds: float = SEARCH_S
) -> Found:
    """Return the chosen samples. Raises RealsysError for a damaged file."""
    rows = source.rows()
    passed = _ordered([row for row in rows if wanted.admits(row)], wanted.order)
    searched = unsearched = 0
    if wanted.text:
        needle, end, hits = wanted.text.casefold(), clock() + seconds, []
        for row in passed:
            if clock() > end:
                break
            searched += 1
            if needle in source.text(row.sample_id).casefold():
                hits.append(row)
        unsearched, passed = len(passed) - searched, hits
    page = passed[wanted.offset :][: wanted.limit or None]
    return Found(page, len(rows), len(passed), searched, unsearched)


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    if least is None and most is None:
        return True
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


def _ordered(rows: list[SampleRow], order: Order) -> list[SampleRow]:
    match order:
        case "source":
            return rows
        case "longest":
            return sorted(rows, key=lambda row: -row.tokens)
        case "shortest":
            return sorted(rows, key=lambda row: row.tokens)
        case "reward":
            return sorted(rows, key=lambda row: math.inf if row.reward is None else row.reward)
        case "stalest":
            return sorted(rows, key=lambda row: -(row.staleness or 0))
        case "advantage":
            return sorted(rows, key=lambda row: -abs(row.advantage or 0.0))

"""Samples: contract of a source of them, and filters.

A source is a recorded train step, an evaluation, or the groups that were not trained.

A list shows ``SampleRow``s, which need no token of a sample. ``view`` reads one sample with its tokens. So a source of
any size is shown with little memory. Every text in here is untrusted: it is the output of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import msgspec

from realsys.errors import ConfigError

TurnKind = Literal["prompt", "context", "sampled", "masked"]


class SampleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample in a list.

    sample_id   unique in its source
    group       id of its ticket, or number of its problem
    tokens      sampled tokens
    staleness   versions between the oldest token and the weights that were trained; None: it was not trained
    outcome     why it was not trained; "" if it was, and for evaluations
    """

    sample_id: str
    group: str
    prompt_index: int
    reward: float | None
    correct: bool | None
    tokens: int
    truncated: bool = False
    finish_reason: str = "stop"
    staleness: int | None = None
    advantage: float | None = None
    outcome: str = ""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Neighbouring tokens of one kind.

    kind        prompt: up to the first sampled token; context: given later, as the result of a tool; sampled: trained;
                masked: sampled, but too old to be trained
    pieces      text that each token adds; the whole text as one piece if the tokens are unknown
    versions    version that sampled each token; one number if it is the same for all; empty if the policy did not
                sample them, or if it is unknown
    logprobs    nats, when it was sampled; likewise
    advantages  as trained; likewise
    """

    kind: TurnKind
    pieces: list[str]
    versions: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class SampleView(msgspec.Struct, frozen=True):
    """One sample with its text.

    facts      (name, value) for people, in the order to show
    reference  the reference answer; None if it is unknown, for the reason in ``note``
    """

    row: SampleRow
    turns: list[Turn]
    facts: list[tuple[str, str]]
    reference: str | None = None
    note: str = ""


class SampleSource(Protocol):
    """Samples of one place in a trial. Methods raise RealsysError for a damaged file."""

    @property
    def title(self) -> str:
        """One line on what the samples are."""
        ...

    def rows(self) -> Sequence[SampleRow]:
        """Return all samples, in their order."""
        ...

    def prompt(self, sample_id: str) -> str:
        """Return a sample's prompt, or at least its last ``PROMPT_END`` characters."""
        ...

    def text(self, sample_id: str) -> str:
        """Return the text of a sample, with its prompt, for a search."""
        ...

    def view(self, sample_id: str) -> SampleView:
        """Read one sample. Raises RecordError for an unknown id."""
        ...


# ---- filters, as the page and `realsys samples` use them. Pure: the clock is an argument
#
# The metadata are filtered first. Only samples that pass are searched for a text, because a search reads their tokens.
# It ends after ``seconds``; then the result has the number of samples that were not searched.


VerdictFilter = Literal["any", "correct", "wrong", "unjudged"]
Order = Literal["source", "longest", "shortest", "reward", "stalest", "advantage"]

SEARCH_S = 3.0
PAGE_SAMPLES = 100
MOST_SAMPLES = 1000  # most samples in one answer
PROMPT_END = 200  # characters of a prompt beside the name of its group
_VERDICTS: dict[str, bool | None] = {"correct": True, "wrong": False, "unjudged": None}


class Filter(msgspec.Struct, frozen=True):
    """Samples to choose, and their order. Bounds include their ends; None: no bound.

    text   part of prompt or completion; small and capital letters are equal
    group  id of a ticket, or number of a problem
    limit  samples of one page; 0: all, which a request cannot ask for
    """

    verdict: VerdictFilter = "any"
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
            choices = {"verdict": get_args(VerdictFilter), "order": get_args(Order)}.get(field)
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


class FoundSamples(msgspec.Struct, frozen=True):
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
) -> FoundSamples:
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
    return FoundSamples(page, len(rows), len(passed), searched, unsearched)


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

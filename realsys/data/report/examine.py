"""Reading of a data set for a report. Bad rows are collected, not raised, so that one call names all of them.

    pass 1  every row: layout, lengths, duplicates, reference; held-out prompts go into an index
    pass 2  train rows against the index; only if something is held out

Rows pass through in batches. The hash and the length of a row are kept, the row is not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from realsys.config.schema_data import AUTO_LAYOUT, DataConfig
from realsys.data.conversion.convert import Source, Split, encoded, prompt_lengths, rows_of, sources_of
from realsys.data.layouts.base import Row
from realsys.data.layouts.detect import detect
from realsys.data.prompts import plain_text, prompt_key, side_of
from realsys.data.report.near_duplicates import Near, NearDuplicates
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError

T = TypeVar("T")

_BATCH = 256
_KEPT = 100  # examples of each kind
UNVERIFIED = "cannot be verified by"  # problem of a reference, followed by the verifier
MAX_HELD_OUT = 20_000  # held-out prompts in the index of near-duplicates

#: Takes rows and returns the problem with each reference answer, None if the answer can be used.
CheckAnswers = Callable[[Sequence[Row]], Sequence[str | None]]


@dataclass
class Report:
    """Result of reading a data set. Lists of examples have at most 100 entries; the counts have no limit.

    bad       (place, problem)            rows that cannot be used
    repeated  place                       rows with the prompt of an earlier row of their split
    leaked    place                       train rows with a held-out prompt; they are left out of training
    marked    place: mark                 prompts that have marks of the chat template already
    near      (place, held-out prompt)    train rows that are like one, most similar first
    lengths   tokens of each prompt, characters without a tokenizer
    first     the first prompt as the model gets it
    """

    layouts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    bad: list[tuple[str, str]] = field(default_factory=list)
    bad_count: int = 0
    long_count: int = 0
    repeated: list[str] = field(default_factory=list)
    repeated_count: int = 0
    leaked: list[str] = field(default_factory=list)
    leaked_count: int = 0
    near: list[tuple[str, Near]] = field(default_factory=list)
    near_count: int = 0
    held_out_compared: int = 0
    code_tasks: int = 0
    marked: list[str] = field(default_factory=list)
    marked_count: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    first: str | None = None


class Examiner:
    """Reader of the sources of ``data``. ``check_answers`` gets every row that can be read and written as JSON."""

    def __init__(self, data: DataConfig, tokenizer: TextTokenizer | None, check_answers: CheckAnswers) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._check_answers = check_answers
        self._keys: dict[str, set[int]] = {"train": set(), "eval": set()}
        self._index = NearDuplicates()
        self.report = Report()

    def examine(self) -> Report:
        """Read everything. Raises DataError for a source that cannot be read at all."""
        # Held-out problems first: a train row is compared with all of them.
        for split in ("eval", "train"):
            for source in sources_of(self._data, split):
                for batch in self._batches(source, split):
                    self._take(batch, split)
        if len(self._index):
            self._compare()
        return self.report

    def _batches(self, source: Source, split: Split) -> Iterator[list[tuple[str, Row]]]:
        batch: list[tuple[str, Row]] = []
        for given, row in rows_of(source, split):
            if row is None:
                self._add_bad(given.where, given.problem)
                continue
            try:
                encoded(row, given.where)
            except DataError as error:
                self._add_bad(given.where, str(error).removeprefix(f"{given.where}: "))
                continue
            if source.name not in self.report.layouts:
                name = source.layout if source.layout != AUTO_LAYOUT else detect(given.values) or source.layout
                self.report.layouts[source.name] = name
            batch.append((given.where, row))
            if len(batch) == _BATCH:
                yield batch
                batch = []
        yield batch

    def _take(self, batch: list[tuple[str, Row]], split: Split) -> None:
        problems = self._check_answers([row for _, row in batch])
        for (where, row), length, problem in zip(batch, self._lengths(batch), problems, strict=True):
            if length is None or not self._fits(where, length):
                continue
            if problem is not None:
                self._add_bad(where, f"field 'answer': {UNVERIFIED} {self._data.verifier}: {problem}")
                continue
            self.report.lengths.append(length)
            if self._tokenizer and self._data.chat_template and (mark := self._tokenizer.template_mark(row.prompt)):
                self.report.marked_count += 1
                _keep(self.report.marked, f"{where}: {mark}")
            self.report.code_tasks += row.code_tests is not None
            if self.report.first is None and split == "train":
                self.report.first = self._rendered(row)
            self._place(where, row, split)

    def _place(self, where: str, row: Row, split: Split) -> None:
        """Count a row in the split that a trial puts it into."""
        report, key = self.report, prompt_key(row.prompt)
        side = split if self._data.eval else side_of(row.prompt, self._data.eval_fraction)
        if side == "train" and key in self._keys["eval"]:
            report.leaked_count += 1
            _keep(report.leaked, where)
            return
        report.rows[side] += 1
        if key in self._keys[side]:
            report.repeated_count += 1
            _keep(report.repeated, where)
            return
        self._keys[side].add(key)
        if side == "eval" and len(self._index) < MAX_HELD_OUT:
            self._index.add(where, plain_text(row.prompt))

    def _fits(self, where: str, length: int) -> bool:
        limit = self._data.max_prompt_tokens
        if self._tokenizer is None or length <= limit:
            return True
        self.report.long_count += 1
        if self._data.long_prompts == "error":
            self._add_bad(where, f"the prompt has {length} tokens, but data.max_prompt_tokens is {limit}")
        return False

    def _compare(self) -> None:
        self.report.held_out_compared = len(self._index)
        for source in sources_of(self._data, "train"):
            for given, row in rows_of(source, "train"):
                if row is None or prompt_key(row.prompt) in self._keys["eval"]:
                    continue
                if found := self._index.nearest(plain_text(row.prompt)):
                    self.report.near_count += 1
                    self.report.near.append((given.where, found))
                    self.report.near.sort(key=lambda pair: -pair[1].similarity)
                    del self.report.near[_KEPT:]

    def _lengths(self, batch: list[tuple[str, Row]]) -> list[int | None]:
        """Return the length of each prompt, None for one that cannot be tokenised."""
        if self._tokenizer is None:
            return [len(plain_text(row.prompt)) for _, row in batch]
        try:
            return list(prompt_lengths(self._tokenizer, [row for _, row in batch], chat=self._data.chat_template))
        except DataError:  # the batch does not tell which one failed
            return [self._length(where, row, self._tokenizer) for where, row in batch]

    def _length(self, where: str, row: Row, tokenizer: TextTokenizer) -> int | None:
        try:
            return prompt_lengths(tokenizer, [row], chat=self._data.chat_template)[0]
        except DataError as error:
            self._add_bad(where, f"field 'prompt': {error}")
            return None

    def _rendered(self, row: Row) -> str:
        if self._tokenizer is None:
            return plain_text(row.prompt)
        ids = self._tokenizer.encode_prompt(row.prompt, chat=self._data.chat_template, tools=row.tools)
        return self._tokenizer.decode(ids)

    def _add_bad(self, where: str, problem: str) -> None:
        self.report.bad_count += 1
        _keep(self.report.bad, (where, problem))


def _keep(examples: list[T], one: T) -> None:
    if len(examples) < _KEPT:
        examples.append(one)

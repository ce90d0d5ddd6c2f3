"""Checks of data before any process is started.

check_data   the prompts and demonstrations of a trial, as it will read them; the first bad line is an error
Examiner     the sources of a configuration for `realsys data check`; bad rows are collected, so that one call names
             all of them
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from realsys.config.dataflow import is_supervised, takes_prompts
from realsys.config.evaluation_sets import sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import AUTO_LAYOUT, HELD_OUT, TRAIN, DataConfig
from realsys.data.convert import DataSource, Split, encoded, prompt_lengths, rows_of, sources_of
from realsys.data.layouts import ProblemRow, detect
from realsys.data.learning import LearningData, check_learning_data, learning_data
from realsys.data.prompts import (
    PromptDataset,
    dropped_lines,
    is_converted,
    plain_text,
    prompt_key,
    side_of,
)
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError

_SHOWN = 10
MARKED = "the chat template writes it again: give the text alone, or set data.chat_template=false"
LEFT_OUT = "the chat template does not print it, so the model never sees it: write it into the user's message"


class DataCheck(NamedTuple):
    """Result of reading the data of a trial.

    sizes     number of prompts per split, and of rows of data.demos to train on
    warnings  one line each
    digest    of the prompts to train on, or of the rows of a supervised run, in order
    """

    sizes: dict[str, int]
    warnings: list[str]
    digest: str


def check_data(config: Config, paths: TrialPaths, tokenizer: TextTokenizer) -> DataCheck:
    """Read and tokenise every line that the trial will use.

    Raises DataError naming file and line. Takes about 50 microseconds for a short line.
    """
    prompts = PromptDataset(config, paths, tokenizer)
    checked = prompts.check()
    warnings = _warnings(checked.unknown, prompts.size("train"), config)
    if checked.marked:
        warnings.append(f"{checked.marked} is in the prompt, and {MARKED}")
    if checked.left_out:
        warnings.append(f"{checked.left_out}: {LEFT_OUT}")
    if prompts.leaked:
        where = "in data.eval or in a set of evaluations" if sources_of_sets(config) else "in data.eval"
        warnings.append(f"left out {prompts.leaked} rows of data.train: their prompts are {where}")
    if is_converted(paths):
        warnings += dropped_lines(paths)
    sizes = prompts.sizes()
    digest = checked.digest
    if config.warmup.steps or is_supervised(config):
        learned = learning_data(config, paths, tokenizer)
        of_rows = check_learning_data(config, learned)
        sizes["demos"] = learned.size(TRAIN)
        if is_supervised(config):
            digest = of_rows.digest
            warnings += _warnings_of_rows(config, learned)
    return DataCheck(sizes, warnings, digest)


def _warnings_of_rows(config: Config, learned: LearningData) -> list[str]:
    warnings, rows = [], learned.size(TRAIN)
    if rows < (batch := config.train.batch_groups):
        problem = f"there are fewer rows in data.demos to train on ({rows}) than train.batch_groups ({batch})"
        warnings.append(f"{problem}: a batch has some of them more than once")
    if config.data.eval_fraction and not learned.size(HELD_OUT):
        fraction = f"data.eval_fraction={config.data.eval_fraction:g}"
        warnings.append(f"{fraction} holds out none of {rows} rows of data.demos: no held-out loss is measured")
    return warnings


def _warnings(unknown: list[str], prompts: int, config: Config) -> list[str]:
    warnings = []
    if unknown:
        shown = " ".join(unknown[:_SHOWN]) + (" ..." if len(unknown) > _SHOWN else "")
        warnings.append(
            f"the tokenizer does not know {len(unknown)} characters of the prompts, and loses them: {shown}"
        )
    if prompts < (batch := config.train.batch_groups) and takes_prompts(config):
        problem = f"there are fewer train prompts ({prompts}) than train.batch_groups ({batch})"
        warnings.append(f"{problem}: a batch has some of them more than once")
    return warnings


# ---- report on a data set
#
#     pass 1  every row: layout, lengths, duplicates, reference; held-out prompts go into an index
#     pass 2  train rows against the index; only if something is held out
#
# Rows pass through in batches. The hash and the length of a row are kept, the row is not.

T = TypeVar("T")

_BATCH_ROWS = 256
_KEPT = 100  # examples of each kind
UNVERIFIED = "cannot be verified by"  # problem of a reference, followed by the verifier
MAX_HELD_OUT = 20_000  # held-out prompts in the index of near-duplicates

#: Takes rows and returns the problem with each reference answer, None if the answer can be used.
CheckAnswers = Callable[[Sequence[ProblemRow]], Sequence[str | None]]


@dataclass
class DataReport:
    """Result of reading a data set. Lists of examples have at most 100 entries; the counts have no limit.

    bad       (place, problem)            rows that cannot be used
    repeated  place                       rows with the prompt of an earlier row of their split
    leaked    place                       train rows with a held-out prompt; they are left out of training
    marked    place: mark                 prompts that have marks of the chat template already
    left_out  place: part                 of the first prompt with tools or a system message, if the template omits it
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
    left_out: str | None = None
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
        self.report = DataReport()

    def examine(self) -> DataReport:
        """Read everything. Raises DataError for a source that cannot be read at all."""
        # Held-out problems first: a train row is compared with all of them.
        for split in ("eval", "train"):
            for source in sources_of(self._data, split):
                for batch in self._batches(source, split):
                    self._take(batch, split)
        if len(self._index):
            self._compare()
        return self.report

    def _batches(self, source: DataSource, split: Split) -> Iterator[list[tuple[str, ProblemRow]]]:
        batch: list[tuple[str, ProblemRow]] = []
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
            if len(batch) == _BATCH_ROWS:
                yield batch
                batch = []
        yield batch

    def _take(self, batch: list[tuple[str, ProblemRow]], split: Split) -> None:
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
            if self.report.left_out is None and self._tokenizer and self._data.chat_template:
                part = self._tokenizer.left_out(row.prompt, row.tools)
                self.report.left_out = part and f"{where}: {part}"
            self.report.code_tasks += row.code_tests is not None
            if self.report.first is None and split == "train":
                self.report.first = self._rendered(row)
            self._place(where, row, split)

    def _place(self, where: str, row: ProblemRow, split: Split) -> None:
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

    def _lengths(self, batch: list[tuple[str, ProblemRow]]) -> list[int | None]:
        """Return the length of each prompt, None for one that cannot be tokenised."""
        if self._tokenizer is None:
            return [len(plain_text(row.prompt)) for _, row in batch]
        try:
            return list(prompt_lengths(self._tokenizer, [row for _, row in batch], chat=self._data.chat_template))
        except DataError:  # the batch does not tell which one failed
            return [self._length(where, row, self._tokenizer) for where, row in batch]

    def _length(self, where: str, row: ProblemRow, tokenizer: TextTokenizer) -> int | None:
        try:
            return prompt_lengths(tokenizer, [row], chat=self._data.chat_template)[0]
        except DataError as error:
            self._add_bad(where, f"field 'prompt': {error}")
            return None

    def _rendered(self, row: ProblemRow) -> str:
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


# ---- train prompts that are nearly a held-out prompt: their sets of word triples have a Jaccard similarity >= 0.8
#
#     similarity = triples in both / triples in either
#
# A pair that similar shares at least 0.8 n of the n triples of the held-out prompt. So it shares one of any
# ``n - ceil(0.8 n) + 1`` of them. Only that many are indexed, the rarest ones: no pair is missed, and few are compared.

SIMILAR = 0.8
_WORDS = 3  # words of a shingle
_TOKEN = re.compile(r"\w+|[^\w\s]")


class Near(NamedTuple):
    """A held-out prompt that is like a train prompt."""

    where: str
    similarity: float


class NearDuplicates:
    """Index of held-out prompts: first ``add`` all of them, then ask for the ``nearest`` of each train prompt."""

    def __init__(self) -> None:
        self._held_out: list[tuple[str, frozenset[int]]] = []
        self._index: dict[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._held_out)

    def add(self, where: str, text: str) -> None:
        """Add a held-out prompt."""
        self._held_out.append((where, shingles(text)))
        self._index = None

    def nearest(self, text: str) -> Near | None:
        """Return the most similar held-out prompt; None if none is as similar as ``SIMILAR``."""
        if self._index is None:
            self._index = self._make_index()
        own = shingles(text)
        best: Near | None = None
        for number in {number for shingle in own for number in self._index.get(shingle, ())}:
            where, other = self._held_out[number]
            both = len(own & other)
            similarity = both / (len(own) + len(other) - both)
            if similarity >= SIMILAR and (best is None or similarity > best.similarity):
                best = Near(where, similarity)
        return best

    def _make_index(self) -> dict[int, list[int]]:
        counts = Counter(shingle for _, own in self._held_out for shingle in own)
        index: dict[int, list[int]] = {}
        for number, (_, own) in enumerate(self._held_out):
            needed = len(own) - math.ceil(SIMILAR * len(own)) + 1
            for shingle in sorted(own, key=lambda shingle: (counts[shingle], shingle))[:needed]:
                index.setdefault(shingle, []).append(number)
        return index


def shingles(text: str) -> frozenset[int]:
    """Return hashes of all runs of three words; a shorter text is one run. They are valid in this process only."""
    words = _TOKEN.findall(text.casefold())
    last = max(1, len(words) - _WORDS + 1)
    return frozenset(hash(tuple(words[start : start + _WORDS])) for start in range(last))

"""Conversion of sources to the trial's own files, once, before its start.

    source ──rows──> layout ──> {trial}/data/train.jsonl, eval.jsonl    lines {"prompt", "answer", ...}
                                {trial}/data/sources.json               rows and weight of each source; written last

Every process then reads prompts by their number from these files, so a source that is moved or changed later does not
change what a number means. Rows pass through one by one; a source is never in memory as a whole. A JSONL file of
realsys' own layout is read in its place, without a copy, unless long prompts are to be left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.config.evaluation_sets import sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import AUTO_LAYOUT, GENERATED, DataConfig
from realsys.data.conversion.sources_file import Converted, Sources
from realsys.data.dataset_files import set_file, write_atomically
from realsys.data.layouts.base import Row, RowError
from realsys.data.layouts.detect import OWN, Layout, detect, layout_of
from realsys.data.lines import ORIGIN, media_problem
from realsys.data.sources.open import source_files, source_rows
from realsys.data.sources.source_row import SourceRow
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import DataError

Split = Literal["train", "eval"]
_BATCH_ROWS, _BATCH_BYTES = 256, 16 << 20  # rows that are tokenised together


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a split with its settings."""

    name: str
    weight: float = 1.0
    layout: str = AUTO_LAYOUT
    layout_args: dict[str, Any] = field(default_factory=dict)
    source_args: dict[str, Any] = field(default_factory=dict)


def sources_of(data: DataConfig, split: Split) -> list[Source]:
    """Return the sources of a split; none if the split is held out of train, or if there is nothing to train on."""
    if split == "train" and data.mixture:
        return [Source(s.path, s.weight, s.layout, s.layout_args, s.source_args) for s in data.mixture]
    name = data.eval if split == "eval" else data.train
    return [Source(name, 1.0, data.layout, data.layout_args, data.source_args)] if name else []


def needs_copy(data: DataConfig) -> bool:
    """Return True if the data must be converted. Raises DataError for a source that cannot be opened."""
    if data.kind == "arith":
        return False
    if data.mixture or data.long_prompts == "drop":
        return True
    return not all(_is_own(source, split) for split in _SPLITS for source in sources_of(data, split))


def convert(config: Config, paths: TrialPaths) -> None:
    """Write the trial's own files, if it needs them. Raises DataError at the first bad row."""
    if not needs_copy(config.data):
        return
    tokenizer = TextTokenizer(paths.base_model(config)) if config.data.long_prompts == "drop" else None
    paths.data.mkdir(parents=True, exist_ok=True)
    done = {}
    for split in _SPLITS:
        done[split] = _Copy(config.data, tokenizer).write(
            paths.data / f"{split}.jsonl", split, sources_of(config.data, split)
        )
    write_atomically(paths.data_sources, [msgspec.json.encode(Sources(done["train"], done["eval"]))])


def convert_sets(config: Config, paths: TrialPaths) -> None:
    """Write the trial's own copies of the data of its evaluation sets. Raises DataError at the first bad row."""
    for name, own in sources_of_sets(config).items():
        tokenizer = TextTokenizer(paths.base_model(config)) if config.data.long_prompts == "drop" else None
        path = set_file(paths, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        source = Source(own.path, 1.0, own.layout, own.layout_args, own.source_args)
        _Copy(config.data, tokenizer).write(path, "eval", [source])


def rows_of(source: Source, split: Split) -> Iterator[tuple[SourceRow, Row | None]]:
    """Yield every row of a source, with None and its problem if the row is bad. Raises DataError."""
    layout: Layout | None = None
    for given in source_rows(source.name, split, source.source_args):
        if given.problem:
            yield given, None
            continue
        layout = layout or layout_of(source.layout, source.layout_args, given.values, given.where)
        row, problem = _read(layout, given.values)
        yield given._replace(problem=problem), row


def _read(layout: Layout, values: dict[str, Any]) -> tuple[Row | None, str]:
    """Return the row, or None and its problem. A layout may be code of the user."""
    try:
        row = layout(values)
        if not isinstance(row, Row):
            return None, f"the layout returned {type(row).__name__}: it must return a Row"
        row.problem()
        if problem := media_problem(values):
            return None, problem
    except RowError as error:
        return None, str(error)
    except Exception as error:
        return None, " ".join(f"the layout raised {type(error).__name__}: {error}".split())[:300]
    return row, ""


def checked_rows(source: Source, split: Split) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) of a source. Raises DataError at the first bad row."""
    for given, row in rows_of(source, split):
        if row is None:
            raise DataError(f"{given.where}: {given.problem}")
        yield given.where, row


def _is_own(source: Source, split: Split) -> bool:
    """Return True for a file that is read in its place: lines of JSON in the layout of realsys."""
    if source.name.startswith(GENERATED) or source.layout not in (AUTO_LAYOUT, OWN):
        return False
    if [Path(source.name)] != source_files(source.name, split) or source.name.lower().endswith((".parquet", ".arrow")):
        return False
    first = next(source_rows(source.name, split, {}), None)
    if first is not None and not first.where.endswith(":row 1"):
        # A first line that is no row of any layout is left to the reader of own files, which names its problem.
        return source.layout == OWN or bool(first.problem) or detect(first.values) in (OWN, None)
    return first is None


class _Copy:
    """Writer of one split."""

    def __init__(self, data: DataConfig, tokenizer: TextTokenizer | None) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._done: list[Converted] = []

    def write(self, path: Path, split: Split, sources: list[Source]) -> list[Converted]:
        if sources:
            write_atomically(path, self._lines(sources, split))
        return self._done

    def _lines(self, sources: list[Source], split: Split) -> Iterator[bytes]:
        for source in sources:
            rows = dropped = 0
            for batch in _batches(source, split):
                kept = self._kept(batch)
                rows += len(kept)
                dropped += len(batch) - len(kept)
                yield from kept
            if not rows:
                raise DataError(f"{source.name}: no prompts found: add rows, or remove the source")
            self._done.append(Converted(source.name, source.weight, rows, dropped))

    def _kept(self, batch: list[tuple[Row, bytes]]) -> list[bytes]:
        if self._tokenizer is None:
            return [line for _, line in batch]
        rows = [row for row, _ in batch]
        lengths = prompt_lengths(self._tokenizer, rows, chat=self._data.chat_template)
        limit = self._data.max_prompt_tokens
        return [line for (_, line), length in zip(batch, lengths, strict=True) if length <= limit]


def prompt_lengths(tokenizer: TextTokenizer, rows: list[Row], *, chat: bool) -> list[int]:
    """Return the number of tokens of each prompt, template included. Raises DataError."""
    prompts, tools = [row.prompt for row in rows], [row.tools for row in rows]
    return [len(ids) for ids in tokenizer.encode_prompts(prompts, chat=chat, tools=tools)]


def _batches(source: Source, split: Split) -> Iterator[list[tuple[Row, bytes]]]:
    batch: list[tuple[Row, bytes]] = []
    size = 0
    for where, row in checked_rows(source, split):
        line = encoded(row, where)
        batch.append((row, line))
        size += len(line)
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoded(row: Row, where: str) -> bytes:
    """Return the line of a row. Raises DataError for values that JSON cannot hold."""
    try:
        return msgspec.json.encode(row.line() | {ORIGIN: where}) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}") from None


_SPLITS: tuple[Split, ...] = ("train", "eval")

"""Conversion of sources to the trial's own files, once, before its start.

    source ──rows──> layout ──> {trial}/data/train.jsonl, eval.jsonl    lines {"prompt", "answer", ...}
                                {trial}/data/sources.json               rows and weight of each source; written last
           ──rows─────────────> {trial}/data/demos.jsonl                lines with the keys of the rows

Every process then reads prompts by their number from these files, so a source that is moved or changed later does not
change what a number means. Rows pass through one by one; a source is never in memory as a whole. A JSONL file of
realsys' own layout is read in its place, without a copy, unless long prompts are to be left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from realsys.config.dataflow import is_supervised
from realsys.config.evaluation_sets import sources_of_sets
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import AUTO_LAYOUT, GENERATED, DataConfig
from realsys.data.layouts import OWN, Layout, ProblemRow, detect, layout_of, read_row
from realsys.data.lines import ORIGIN
from realsys.data.prompts import (
    ConvertedSource,
    SourcesFile,
    copies_demos,
    held_out_size,
    is_converted,
    set_file,
    side_of,
    write_atomically,
)
from realsys.data.sources import source_files, source_rows
from realsys.data.sources.files import SourceRow
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError

Split = Literal["train", "eval"]
_SPLITS: tuple[Split, ...] = ("train", "eval")
_BATCH_ROWS, _BATCH_BYTES = 256, 16 << 20  # rows that are tokenised together


@dataclass(frozen=True, slots=True)
class DataSource:
    """One source of a split with its settings."""

    name: str
    weight: float = 1.0
    layout: str = AUTO_LAYOUT
    layout_args: dict[str, Any] = field(default_factory=dict)
    source_args: dict[str, Any] = field(default_factory=dict)


def sources_of(data: DataConfig, split: Split) -> list[DataSource]:
    """Return the sources of a split; none if the split is held out of train, or if there is nothing to train on."""
    if split == "train" and data.mixture:
        return [DataSource(s.path, s.weight, s.layout, s.layout_args, s.source_args) for s in data.mixture]
    name = data.eval if split == "eval" else data.train
    return [DataSource(name, 1.0, data.layout, data.layout_args, data.source_args)] if name else []


def needs_copy(data: DataConfig) -> bool:
    """Return True if the data must be converted. Raises DataError for a source that cannot be opened."""
    if data.kind == "arith":
        return False
    if data.mixture or data.long_prompts == "drop":
        return True
    return not all(_is_own(source, split) for split in _SPLITS for source in sources_of(data, split))


def _demo_lines(source: str) -> Iterator[bytes]:
    """Yield the rows of ``data.demos`` with their own keys, which its reader checks."""
    for given in source_rows(source, "train", {}):
        if given.problem:
            raise DataError(f"{given.where}: {given.problem}")
        yield _encoded_line(given.values, given.where)


def convert(config: Config, paths: TrialPaths) -> None:
    """Write the trial's own files, if it needs them. Raises DataError at the first bad row."""
    if copies_demos(config.data):
        paths.data.mkdir(parents=True, exist_ok=True)
        write_atomically(paths.demos, _demo_lines(config.data.demos))
    if not needs_copy(config.data):
        return
    tokenizer = TextTokenizer(paths.base_model(config)) if config.data.long_prompts == "drop" else None
    paths.data.mkdir(parents=True, exist_ok=True)
    done = {}
    for split in _SPLITS:
        done[split] = _Copy(config.data, tokenizer).write(
            paths.data / f"{split}.jsonl", split, sources_of(config.data, split)
        )
    write_atomically(paths.data_sources, [msgspec.json.encode(SourcesFile(done["train"], done["eval"]))])


def convert_sets(config: Config, paths: TrialPaths) -> None:
    """Write the trial's own copies of the data of its evaluation sets. Raises DataError at the first bad row."""
    for name, own in sources_of_sets(config).items():
        tokenizer = TextTokenizer(paths.base_model(config)) if config.data.long_prompts == "drop" else None
        path = set_file(paths, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        source = DataSource(own.path, 1.0, own.layout, own.layout_args, own.source_args)
        _Copy(config.data, tokenizer).write(path, "eval", [source])


def rows_of(source: DataSource, split: Split) -> Iterator[tuple[SourceRow, ProblemRow | None]]:
    """Yield every row of a source, with None and its problem if the row is bad. Raises DataError."""
    layout: Layout | None = None
    for given in source_rows(source.name, split, source.source_args):
        if given.problem:
            yield given, None
            continue
        layout = layout or layout_of(source.layout, source.layout_args, given.values, given.where)
        row, problem = read_row(layout, given.values)
        yield given._replace(problem=problem), row


def checked_rows(source: DataSource, split: Split) -> Iterator[tuple[str, ProblemRow]]:
    """Yield (place, row) of a source. Raises DataError at the first bad row."""
    for given, row in rows_of(source, split):
        if row is None:
            raise DataError(f"{given.where}: {given.problem}")
        yield given.where, row


def _is_own(source: DataSource, split: Split) -> bool:
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
        self._done: list[ConvertedSource] = []

    def write(self, path: Path, split: Split, sources: list[DataSource]) -> list[ConvertedSource]:
        if sources:
            write_atomically(path, self._lines(sources, split))
        return self._done

    def _lines(self, sources: list[DataSource], split: Split) -> Iterator[bytes]:
        for source in sources:
            rows = dropped = 0
            for batch in _batches(source, split):
                kept = self._kept(batch)
                rows += len(kept)
                dropped += len(batch) - len(kept)
                yield from kept
            if not rows:
                raise DataError(f"{source.name}: no prompts found: add rows, or remove the source")
            self._done.append(ConvertedSource(source.name, source.weight, rows, dropped))

    def _kept(self, batch: list[tuple[ProblemRow, bytes]]) -> list[bytes]:
        if self._tokenizer is None:
            return [line for _, line in batch]
        rows = [row for row, _ in batch]
        lengths = prompt_lengths(self._tokenizer, rows, chat=self._data.chat_template)
        limit = self._data.max_prompt_tokens
        return [line for (_, line), length in zip(batch, lengths, strict=True) if length <= limit]


def prompt_lengths(tokenizer: TextTokenizer, rows: list[ProblemRow], *, chat: bool) -> list[int]:
    """Return the number of tokens of each prompt, template included. Raises DataError."""
    prompts, tools = [row.prompt for row in rows], [row.tools for row in rows]
    return [len(ids) for ids in tokenizer.encode_prompts(prompts, chat=chat, tools=tools)]


def _batches(source: DataSource, split: Split) -> Iterator[list[tuple[ProblemRow, bytes]]]:
    batch: list[tuple[ProblemRow, bytes]] = []
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


def encoded(row: ProblemRow, where: str) -> bytes:
    """Return the line of a row. Raises DataError for values that JSON cannot hold."""
    return _encoded_line(row.line(), where)


def _encoded_line(values: dict[str, Any], where: str) -> bytes:
    try:
        return msgspec.json.encode(values | {ORIGIN: where}) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}") from None


# ---- number of held-out problems, before the trial exists


def count_held_out(config: Config, paths: TrialPaths, most: int) -> int:
    """Count the held-out problems; data that must be converted is read until there are ``most``.

    Long prompts that a conversion leaves out are counted. Raises DataError.
    """
    if is_converted(paths) or not needs_copy(config.data):
        return held_out_size(config, paths)
    rows = (row for source in sources_of(config.data, "eval") for _, row in checked_rows(source, "eval"))
    if not config.data.eval:
        train = (row for source in sources_of(config.data, "train") for _, row in checked_rows(source, "train"))
        rows = (row for row in train if side_of(row.prompt, config.data.eval_fraction) == "eval")
    return sum(1 for _ in islice(rows, most))


# ---- checks that the prompts of a trial stay the same: ledger and checkpoints know a prompt by its number alone
#
# A trial stores a digest of its prompts at its first start. A later start, and a trial that resumes from it, must have
# the same prompts in the same order. Otherwise the cursor would skip some prompts and repeat others.

_DIGEST_FILE = "train.digest"
#: settings that a copy of the data was made with
_MADE_WITH = ("train", "eval", "mixture", "layout", "layout_args", "source_args", "long_prompts")
_MADE_WITH_LIMIT = ("max_prompt_tokens", "chat_template")
_OF_SETS = ("path", "layout", "layout_args", "source_args")


def check_copy(config: Config, earlier: Config, paths: TrialPaths) -> None:
    """Check that a trial which continues reads the data that it was begun with. Raises ConfigError."""
    data, begun = config.data, earlier.data
    again = "choose another trial name"
    _check_sets(config, earlier, again)
    if paths.demos.is_file() and data.demos != begun.demos:
        problem = f"trial {config.trial!r} has its own copy of {begun.demos!r}: keep that, or {again}"
        raise ConfigError("data.demos", data.demos, problem)
    if not is_converted(paths):
        if needs_copy(data):
            problem = f"must be converted, and trial {config.trial!r} was begun with a file that is read in its place"
            raise ConfigError("data.train", data.train or "(mixture)", f"{problem}: {again}")
        return
    limits = _MADE_WITH_LIMIT if begun.long_prompts == "drop" else ()
    for name in (*_MADE_WITH, *limits):
        if (new := getattr(data, name)) != (old := getattr(begun, name)):
            problem = f"trial {config.trial!r} has its own copy of the data, made with {old!r}: keep that, or {again}"
            raise ConfigError(f"data.{name}", new, problem)


def _check_sets(config: Config, earlier: Config, again: str) -> None:
    """Check that the trial has copies of the data of its evaluation sets, made from the same sources."""
    before = sources_of_sets(earlier)
    for name, new in sources_of_sets(config).items():
        for setting in _OF_SETS:
            old = getattr(before[name], setting) if name in before else None
            if old != (value := getattr(new, setting)):
                problem = f"trial {config.trial!r} was begun with {old!r}: keep that, or {again}"
                raise ConfigError(f"evaluation.sets.{name}.{setting}", value, problem)


def check_prompts(config: Config, paths: TrialPaths, digest: str) -> None:
    """Check the prompts against those of this trial's earlier starts, and of the trial that it resumes.

    ``digest``: of the prompts, or of the lines of ``data.demos`` that a supervised run trains on. Raises ConfigError.
    """
    begun = _read_digest(paths)
    source = f"trial {config.trial!r} was begun"
    if begun is None and config.resume:
        begun = _read_digest(TrialPaths(Path(config.resume).parents[1]))
        source = f"resume={config.resume} was trained"
    if begun not in (None, digest):
        what, field, value = "prompts", "data.train", config.data.train or "(mixture)"
        if is_supervised(config):
            what, field, value = "rows", "data.demos", config.data.demos
        problem = f"{source} with other {what}, or in another order, so some would be skipped and others repeated"
        raise ConfigError(field, value, f"{problem}: use the same data")


def write_digest(paths: TrialPaths, digest: str) -> None:
    """Store the digest at the first start."""
    paths.data.mkdir(exist_ok=True)
    if _read_digest(paths) is None:
        write_atomically(paths.data / _DIGEST_FILE, [digest.encode()])


def _read_digest(paths: TrialPaths) -> str | None:
    try:
        return (paths.data / _DIGEST_FILE).read_text("ascii")
    except (FileNotFoundError, NotADirectoryError):
        return None

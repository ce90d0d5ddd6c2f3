"""Check a data set: read it as a run would, and report what is in it.

realsys data check SOURCE ──> prompts as in a run ──> counts, lengths, duplicates, the first prompt; bad rows
                          ──> rows to learn from, if the algorithm does ──> counts, lengths, the first row
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from realsys.config.compose import compose, quoted
from realsys.config.dataflow import dataflow_of, is_supervised
from realsys.config.paths import TrialPaths
from realsys.config.rules import check_sources, check_verifiers
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT, TRAIN, absolute_source
from realsys.data.check import LEFT_OUT, MARKED, UNVERIFIED, DataReport, Examiner
from realsys.data.convert import convert
from realsys.data.layouts import ProblemRow
from realsys.data.learning import LearningRow, check_learning_data, learning_data
from realsys.data.prompts import plain_text
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import ConfigError, DataError
from realsys.reward.rubric import read_rubric
from realsys.reward.verifiers.contract import Item
from realsys.rollout.check_references import ReferenceChecker

EXIT_OK, EXIT_BAD_DATA = 0, 2
_SHOWN = 20  # bad rows
_PAIRS = 3  # examples of near-duplicates
_PROMPT_CHARACTERS = 2000


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="read a data set as a run would, and report what is in it",
        description="Read a data set as a run would. Print counts, lengths, duplicates, train prompts that are like "
        "held-out ones, and the first prompt as the model gets it. Exit code 2 if a row is bad; each is one line. "
        "With experiment=sft, dpo or reward_model: rows to learn from, as in data.demos; the first bad row ends it.",
    )
    check.add_argument("source", metavar="SOURCE", help="file, folder or reasoning_gym:NAME, as in data.train")
    check.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="model.path=DIR, data.eval=FILE, data.layout=NAME, ..."
    )


def run(args: Namespace) -> int:
    """Print a report on a source, which is any value of data.train. Returns 2 if it has bad rows.

    Raises ConfigError for wrong settings, DataError for a source that cannot be read, ModelError.
    """
    source, overrides = args.source, args.overrides
    named = any(text.startswith("experiment=") for text in overrides)
    config = compose([*([] if named else ["experiment=math"]), *overrides, f"data.train={quoted(source)}"])
    if is_supervised(config):
        print(*describe_rows(config), sep="\n")
        return EXIT_OK
    config = read_rubric(config)
    data = config.data.model_copy(
        update={"train": absolute_source(config.data.train), "eval": absolute_source(config.data.eval), "kind": "jsonl"}
    )
    check_sources(data)
    tokenizer = TextTokenizer(Path(config.model.path).expanduser()) if config.model.path else None
    check_verifiers(config)
    with ReferenceChecker(config) as checker:
        report = Examiner(data, tokenizer, lambda rows: checker.problems(reference_items(rows))).examine()
    if not (report.bad_count or report.long_count or sum(report.rows.values())):
        raise DataError(f"{source}: no prompts found: add rows")
    for line in describe(report, config, has_tokens=tokenizer is not None):
        print(line)
    sys.stdout.flush()
    for line in bad_rows(report):
        print(line, file=sys.stderr)
    chosen = any(text.startswith("data.verifier=") for text in overrides)
    if not chosen and any(UNVERIFIED in problem for _, problem in report.bad):
        print("realsys: name the verifier of your task: data.verifier=", file=sys.stderr)
    return EXIT_BAD_DATA if report.bad_count else EXIT_OK


def describe_rows(config: Config) -> Iterator[str]:
    """Yield the lines of the report on rows to learn from, which ``data.train`` names here.

    Raises ConfigError, and DataError for the first bad row.
    """
    source, path = absolute_source(config.data.train), config.model.path
    if not path:
        raise ConfigError("model.path", path, "is needed: its tokenizer and chat template decide what is learned")
    data = config.data.model_copy(update={"kind": "jsonl", "train": "", "eval": "", "demos": source})
    config = config.model_copy(update={"data": data})
    tokenizer = TextTokenizer(Path(path).expanduser())
    with TemporaryDirectory() as folder:
        paths = TrialPaths(Path(folder))
        convert(config, paths)
        learned = learning_data(config, paths, tokenizer)
        checked = check_learning_data(config, learned)
        yield f"{source}: {dataflow_of(config).rows}"
        held_out = f"{learned.size(HELD_OUT):,} held out (data.eval_fraction={data.eval_fraction:g})"
        yield f"rows        {learned.size(TRAIN):,} train, {held_out}"
        yield f"tokens      {_distribution(checked.lengths)}"
        for name, row in zip(("first", "rejected"), learned.rows(TRAIN, 0), strict=False):
            yield from ("", f"{name} row, with >>> before and <<< after what is learned:", _marked(row, tokenizer))


def _marked(row: LearningRow, tokenizer: TextTokenizer) -> str:
    runs = [
        (own, [token for token, _ in run])
        for own, run in groupby(zip(row.tokens, row.loss_mask, strict=True), key=itemgetter(1))
    ]
    text = "".join(f">>>{tokenizer.decode(run)}<<<" if own else tokenizer.decode(run) for own, run in runs)
    return text[:_PROMPT_CHARACTERS] + (" ..." if len(text) > _PROMPT_CHARACTERS else "")


def reference_items(rows: Sequence[ProblemRow]) -> list[Item]:
    """Return the items that a verifier gets to check the references of ``rows``."""
    items = []
    for row in rows:
        extra = {key: value for key, value in row.line().items() if key not in ("prompt", "answer")}
        items.append(Item(plain_text(row.prompt), "", row.answer, extra))
    return items


def describe(report: DataReport, config: Config, *, has_tokens: bool) -> Iterator[str]:
    """Yield the lines of the report, without the bad rows."""
    data = config.data
    for source, layout in report.layouts.items():
        yield f"{source}: layout {layout}"
    held = "data.eval" if data.eval else f"data.eval_fraction={data.eval_fraction:g}"
    train, held_out = report.rows["train"], report.rows["eval"]
    yield f"rows        {train:,} train, {held_out:,} held out ({held}), {report.bad_count:,} bad"
    if report.code_tasks:
        yield f"code tests  {report.code_tasks:,} rows"
    if len(report.lengths):
        yield f"{'tokens' if has_tokens else 'characters':11} {_distribution(report.lengths)}"
    if not has_tokens:
        yield "            set model.path=DIR to count tokens with its chat template"
    elif data.long_prompts == "drop":
        yield f"long        {report.long_count:,} rows have more than {data.max_prompt_tokens} tokens and are left out"
    yield f"duplicates  {_counted(report.repeated_count, report.repeated, 'rows repeat the prompt of an earlier row')}"
    if report.marked_count:
        text = f"prompts have a mark, and {MARKED}"
        yield f"formatted   {_counted(report.marked_count, report.marked, text)}"
    if report.left_out:
        yield f"left out    {report.left_out}: {LEFT_OUT}"
    if report.leaked_count:
        text = "train rows have a held-out prompt and are left out of training"
        yield f"leaks       {_counted(report.leaked_count, report.leaked, text)}"
    if report.held_out_compared:
        text = f"train rows are similar to one of {report.held_out_compared:,} held-out prompts"
        pairs = [f"{where} and {near.where} ({near.similarity:.2f})" for where, near in report.near]
        yield f"near        {_counted(report.near_count, pairs, text)}"
    if report.first is not None:
        shown = report.first[:_PROMPT_CHARACTERS]
        yield from ("", "first prompt:", shown + (" ..." if len(report.first) > len(shown) else ""))


def bad_rows(report: DataReport) -> Iterator[str]:
    """Yield a line for each of the first bad rows: file, line, field and problem."""
    for where, problem in report.bad[:_SHOWN]:
        yield f"realsys: {where}: {problem}"
    if report.bad_count > _SHOWN:
        yield f"realsys: {report.bad_count - _SHOWN:,} more rows are bad"


def _distribution(values: array[int]) -> str:
    lengths = np.frombuffer(values, np.int64)
    median, high, higher = np.percentile(lengths, [50, 95, 99])
    parts = {"min": lengths.min(), "median": median, "95 %": high, "99 %": higher, "max": lengths.max()}
    return ", ".join(f"{name} {value:,.0f}" for name, value in parts.items())


def _counted(count: int, examples: Sequence[str], text: str) -> str:
    shown = f": {', '.join(examples[:_PAIRS])}{', ...' if count > _PAIRS else ''}" if count else ""
    return f"{count:,} {text}{shown}"

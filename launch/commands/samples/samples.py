"""`realsys samples`: shows samples of a train step, of an evaluation, or of groups that were not trained.

Reading and filters are those of the sample viewer (``realsys.view.samples``); each kind of sample has its lines here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RecordError
from realsys.launch.commands.replay import last_recorded
from realsys.launch.commands.samples.lines import dropped_lines, group_lines, printable, problem_lines
from realsys.launch.commands.trials.finding import find_trial
from realsys.view.samples.base import SampleRow, SampleSource
from realsys.view.samples.catalogue import DROPPED, Catalogue
from realsys.view.samples.eval_samples import EvalSource
from realsys.view.samples.filters import Filter, choose
from realsys.view.samples.step_samples import StepSource
from realsys.view.samples.stored import chosen_evaluation

_SHOWN = 4  # prompts without --limit

Group = Sequence[SampleRow]


@dataclass(frozen=True, slots=True)
class Options:
    """Samples to show.

    filter   which ones; its page is not used
    step     train step; None: the last recorded one
    eval_id  an evaluation instead of a step: its id, "" for the newest one; None: no evaluation
    of_set   name of its data set; "" any
    dropped  groups that were not trained instead of a step
    prompts  number of prompts, 0 for all; None: a few on the terminal, all as JSON
    """

    filter: Filter
    step: int | None = None
    eval_id: str | None = None
    of_set: str = ""
    dropped: bool = False
    prompts: int | None = None
    as_json: bool = False


def show_samples(trial_dir: Path, options: Options) -> int:
    """Print the chosen samples. Raises RealsysError for bad input and a damaged file."""
    if options.prompts is not None and options.prompts < 0:
        raise ConfigError("--limit", options.prompts, "must be 0 (all) or more")
    paths = find_trial(trial_dir)
    catalogue = Catalogue(paths)
    source, encode, lines = _opened(paths, catalogue, options)
    found = choose(source, msgspec.structs.replace(options.filter, offset=0, limit=0), time.monotonic, float("inf"))
    groups = by_group(found.rows)
    if options.filter.group and not any(row.group == options.filter.group for row in source.rows()):
        raise RecordError(missing(options.filter.group, source))
    whole = options.prompts is not None or options.as_json
    shown = groups[: options.prompts or None] if whole else groups[:_SHOWN]
    if options.as_json:
        return _print_json(encode(row.sample_id) for group in shown for row in group)
    console = Console()
    console.print(printable(source.title), highlight=False, soft_wrap=True, markup=False)
    for group in shown:
        for text in lines(group):
            console.print(text, highlight=False, soft_wrap=True)
    if not groups:
        console.print(f"none of {found.total} samples passes the filters", highlight=False)
    elif len(shown) < len(groups):
        more = f"\n{len(groups) - len(shown)} more prompts: --limit 0 shows all"
        console.print(more, style="dim", highlight=False)
    return 0


def _opened(
    paths: TrialPaths, catalogue: Catalogue, options: Options
) -> tuple[SampleSource, Callable[[str], msgspec.Struct], Callable[[Group], Iterator[Text]]]:
    """Return the source, the reader of one sample for JSON, and the writer of the lines of a group."""
    if options.eval_id is not None:
        stored = catalogue.evaluation(chosen_evaluation(paths.evaluations, options.eval_id, options.of_set))
        return stored, stored.sample, lambda group: problem_lines([stored.sample(row.sample_id) for row in group])
    if options.dropped:
        dropped = catalogue.open(DROPPED)
        return dropped, dropped.view, lambda group: dropped_lines([dropped.view(row.sample_id) for row in group])
    step = catalogue.step(last_recorded(paths) if options.step is None else options.step)
    return step, step.sample, lambda group: group_lines([step.sample(row.sample_id) for row in group])


def by_group(rows: Sequence[SampleRow]) -> list[list[SampleRow]]:
    """Return the samples by ticket or problem, in the order of the first sample of each."""
    groups: dict[str, list[SampleRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def missing(group: str, source: SampleSource) -> str:
    """Return the refusal of a ticket or problem that is not there. It names some that are."""
    names = list(dict.fromkeys(row.group for row in source.rows()))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    match source:
        case StepSource():
            problem = f"step {source.record.step} has not trained ticket {group!r}"
        case EvalSource():
            problem = f"evaluation {source.name!r} has no problem {group!r}"
        case _:
            problem = f"no group of ticket {group!r} was kept"
    return f"{problem}: it has {', '.join(names[:5])}{more}" if names else problem


def _print_json(found: Iterator[msgspec.Struct]) -> int:
    try:
        sys.stdout.writelines(f"{msgspec.json.encode(sample).decode()}\n" for sample in found)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

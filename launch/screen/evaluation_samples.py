"""`realsys samples TRIAL_DIR --eval`: the stored completions of an evaluation, with filters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RecordError
from realsys.evaluation.eval_records import headline
from realsys.evaluation.stored_samples import EvalSample, read_result, read_samples, stored_evaluations

_SHOWN = 4  # problems without --limit
_VERDICTS = {True: "correct", False: "wrong", None: "not judged"}
_COLOURS = {True: "green", False: "red", None: "default"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chosen completions.

    eval_id  of the evaluation; "" the newest one
    of_set   name of its data set; "" any
    problem  index of the only problem to show; None: all
    verdict  True the right completions, False the wrong ones; None: all
    limit    number of problems, 0 for all; None: a few on the terminal, all as JSON
    """

    eval_id: str = ""
    of_set: str = ""
    problem: int | None = None
    verdict: bool | None = None
    limit: int | None = None


def show_eval_samples(trial_dir: Path, wanted: Wanted, as_json: bool) -> int:
    """Print the completions of an evaluation. Raises RealsysError for bad input and a damaged file."""
    if wanted.limit is not None and wanted.limit < 0:
        raise ConfigError("--limit", wanted.limit, "must be 0 (all) or more")
    paths = TrialPaths(trial_dir.resolve())
    read_config(paths.config)  # refuses a folder that is not a trial
    folder = paths.evaluations / chosen_evaluation(paths.evaluations, wanted)
    problems = chosen_problems(read_samples(folder), wanted)
    shown = problems[: wanted.limit or None] if wanted.limit is not None or as_json else problems[:_SHOWN]
    if as_json:
        try:
            sys.stdout.writelines(f"{msgspec.json.encode(sample).decode()}\n" for group in shown for sample in group)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    console = Console()
    result = read_result(folder)
    title = f"{folder.name}: version {result.get('version')}, {headline(result)}"
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    for group in shown:
        for text in problem_lines(group):
            console.print(text, highlight=False, soft_wrap=True)
    if len(shown) < len(problems):
        console.print(
            f"\n{len(problems) - len(shown)} more problems: --limit 0 shows all", style="dim", highlight=False
        )
    return 0


def chosen_evaluation(root: Path, wanted: Wanted) -> str:
    """Return the id of the evaluation to show. Raises RecordError naming those that are stored."""
    stored = stored_evaluations(root)
    if wanted.of_set:
        stored = [name for name in stored if read_result(root / name).get("set") == wanted.of_set]
    if not stored:
        of_set = f" of set {wanted.of_set!r}" if wanted.of_set else ""
        raise RecordError(f"{root}: no evaluation{of_set} has stored completions")
    if not wanted.eval_id:
        return stored[-1]
    if wanted.eval_id in stored:
        return wanted.eval_id
    # The step log calls the one of step 40 at the end "after"; the newest of that name is meant.
    named = [name for name in stored if read_result(root / name).get("eval_id") == wanted.eval_id]
    if not named:
        raise RecordError(f"{root}: no evaluation {wanted.eval_id!r} is stored: use one of {', '.join(stored)}")
    return named[-1]


def chosen_problems(samples: Sequence[EvalSample], wanted: Wanted) -> list[list[EvalSample]]:
    """Return the chosen completions by problem, without problems that have none."""
    chosen = [
        sample
        for sample in samples
        if wanted.problem in (None, sample.problem) and (wanted.verdict is None or sample.correct is wanted.verdict)
    ]
    return [list(group) for _, group in groupby(chosen, key=lambda sample: sample.problem)]


def problem_lines(group: Sequence[EvalSample]) -> Iterator[Text]:
    """Yield the lines of a problem and its completions."""
    first = group[0]
    yield Text()
    yield Text(f"problem {first.problem}", style="bold")
    yield Text("prompt     ").append(printable(first.prompt))
    yield Text("reference  ").append(printable(first.reference))
    for sample in group:
        facts = [
            _VERDICTS[sample.correct],
            f"reward {sample.reward:g}",
            sample.finish_reason,
            f"{sample.tokens} tokens",
        ]
        if sample.answer is not None:
            facts.append(f"answer {printable(sample.answer)}")
        facts += [f"{name} {value:g}" for name, value in sample.metrics.items()]
        versions = sorted({sample.version_min, sample.version_max})
        facts.append("v" + "-".join(map(str, versions)))
        yield Text(f"  {sample.sample:>4}  ").append(", ".join(facts), style=_COLOURS[sample.correct])
        yield Text(" " * 8).append(printable(sample.completion))


def printable(text: str) -> str:
    """Escape all characters but printable ones and line ends: a completion must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text).replace("\n", "\n" + " " * 8)

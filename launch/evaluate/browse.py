"""`realsys samples --eval`: shows the stored completions of an evaluation, by problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RecordError
from realsys.evaluation.records import headline
from realsys.evaluation.samples import EvalSample, read_result, read_samples, stored_evaluations
from realsys.launch.commands.samples import COLOURS, SHOWN, VERDICTS, printable, write_json


def is_evaluation(trial_dir: Path) -> bool:
    """Return True for the folder of `realsys eval`, which has no train steps to show. Raises ConfigError."""
    return read_config(TrialPaths(trial_dir.resolve()).config).evaluate_only


def show_evaluation(trial_dir: Path, eval_id: str, limit: int | None, *, as_json: bool) -> int:
    """Print the completions of an evaluation, the newest one if ``eval_id`` is "". Raises ConfigError, RecordError."""
    if limit is not None and limit < 0:
        raise ConfigError("--limit", limit, "must be 0 (all) or more")
    paths = TrialPaths(trial_dir.resolve())
    config = read_config(paths.config)
    folder = paths.evaluations / _chosen(paths, eval_id)
    problems = [list(group) for _, group in groupby(read_samples(folder), key=lambda sample: sample.problem)]
    shown = problems[: limit or None] if limit is not None or as_json else problems[:SHOWN]
    if as_json:
        write_json(sample for problem in shown for sample in problem)
        return 0
    console = Console()
    title = f"{config.experiment}/{config.trial} evaluation {folder.name}: {headline(read_result(folder))}"
    console.print(title, highlight=False, soft_wrap=True)
    for problem in shown:
        for text in _lines(problem):
            console.print(text, highlight=False, soft_wrap=True)
    if len(shown) < len(problems):
        more = f"\n{len(problems) - len(shown)} more problems: --limit 0 shows all"
        console.print(more, style="dim", highlight=False)
    return 0


def _chosen(paths: TrialPaths, eval_id: str) -> str:
    stored = stored_evaluations(paths.evaluations)
    if not stored:
        raise RecordError(f"{paths.root}: no completions of an evaluation are stored")
    if eval_id and eval_id not in stored:
        raise RecordError(f"{paths.root} has no completions of an evaluation {eval_id!r}: it has {', '.join(stored)}")
    return eval_id or stored[-1]


def _lines(problem: Sequence[EvalSample]) -> Iterator[Text]:
    """Yield the lines of a problem and its completions."""
    first = problem[0]
    yield Text()
    yield Text(f"problem {first.problem}, reference {printable(first.reference)}", style="bold")
    yield Text("prompt  ").append(printable(first.prompt))
    for sample in problem:
        parts = [f"reward {sample.reward:g}", VERDICTS[sample.correct], sample.finish_reason, f"{sample.tokens} tokens"]
        parts += [] if sample.answer is None else [f"answer {printable(sample.answer)}"]
        parts += [f"{name} {value:g}" for name, value in sample.metrics.items()]
        yield Text(f"  {sample.sample:>4}  ").append(", ".join(parts), style=COLOURS[sample.correct])
        yield Text(" " * 8).append(printable(sample.completion))

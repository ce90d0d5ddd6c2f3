"""Show the samples of a recorded train step with their rewards, of an evaluation, or groups that were not trained.

step log, records, evaluations ──observe.samples: sources, filters──> groups ──> lines of each kind, or JSON
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError, RecordError
from realsys.launch.commands.options import add_json, add_trial, find_trial
from realsys.launch.commands.replay import last_recorded
from realsys.observe.evaluation_records import EvalSample
from realsys.observe.samples.catalogue import DROPPED, Catalogue, EvalSource, chosen_evaluation
from realsys.observe.samples.filters import Filter, SampleRow, SampleSource, SampleView, choose
from realsys.observe.samples.step_samples import VERDICTS, Sample, StepSource
from realsys.observe.screen.text_figures import worth_showing

_SHOWN = 4  # prompts without --limit

Group = Sequence[SampleRow]


def add_arguments(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument("--step", type=int, metavar="N", help="default: the last recorded step")
    parser.add_argument(
        "--eval", nargs="?", const="", metavar="ID", help="completions of this evaluation (default: the newest)"
    )
    parser.add_argument("--set", default="", metavar="NAME", help="with --eval: only this data set")
    parser.add_argument("--dropped", action="store_true", help="groups that were not trained: dropped, failed, too old")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts to show, 0: all (default: 4; with --json: all)")
    add_json(parser, "print one JSON object per sample")
    filters = parser.add_argument_group("filters")
    filters.add_argument("--ticket", "--problem", dest="group", default="", metavar="ID", help="only this prompt")
    verdicts = filters.add_mutually_exclusive_group()
    for verdict, what in (("correct", "right"), ("wrong", "wrong"), ("unjudged", "not judged")):
        verdicts.add_argument(
            f"--{verdict}", dest="verdict", action="store_const", const=verdict, help=f"only {what} completions"
        )
    filters.add_argument("--truncated", action="store_true", help="only completions that were cut at their limit")
    filters.add_argument("--min-reward", type=float, metavar="R", help="reward of at least R")
    filters.add_argument("--max-reward", type=float, metavar="R", help="reward of at most R")
    filters.add_argument("--min-staleness", type=int, metavar="N", help="oldest token at least N versions behind")
    filters.add_argument("--min-tokens", type=int, metavar="N", help="at least N sampled tokens")
    filters.add_argument("--grep", default="", metavar="TEXT", help="prompt or completion has this text, in any case")
    filters.add_argument("--longest", action="store_true", help="the longest completions first")


def run(args: Namespace) -> int:
    """Print the chosen samples. Raises RealsysError for bad input and a damaged file."""
    if args.limit is not None and args.limit < 0:
        raise ConfigError("--limit", args.limit, "must be 0 (all) or more")
    paths = find_trial(args.trial_dir)
    catalogue = Catalogue(paths)
    source, encode, lines = _opened(paths, catalogue, args)
    found = choose(source, _filter_of(args), time.monotonic, float("inf"))
    groups = by_group(found.rows)
    if args.group and not any(row.group == args.group for row in source.rows()):
        raise RecordError(missing(args.group, source))
    whole = args.limit is not None or args.json
    shown = groups[: args.limit or None] if whole else groups[:_SHOWN]
    if args.json:
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


def _filter_of(args: Namespace) -> Filter:
    return Filter(
        verdict=args.verdict or "any",
        truncated=args.truncated,
        reward_min=args.min_reward,
        reward_max=args.max_reward,
        stale_min=args.min_staleness,
        tokens_min=args.min_tokens,
        text=args.grep,
        group=args.group,
        order="longest" if args.longest else "source",
        offset=0,
        limit=0,
    )


def _opened(
    paths: TrialPaths, catalogue: Catalogue, args: Namespace
) -> tuple[SampleSource, Callable[[str], msgspec.Struct], Callable[[Group], Iterator[Text]]]:
    """Return the source, the reader of one sample for JSON, and the writer of the lines of a group."""
    if args.eval is not None:
        stored = catalogue.evaluation(chosen_evaluation(paths.evaluations, args.eval, args.set))
        return stored, stored.sample, lambda group: problem_lines([stored.sample(row.sample_id) for row in group])
    if args.dropped:
        dropped = catalogue.open(DROPPED)
        return dropped, dropped.view, lambda group: dropped_lines([dropped.view(row.sample_id) for row in group])
    step = catalogue.step(last_recorded(paths) if args.step is None else args.step)
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


# ---- lines
#
# Samples as lines on a terminal. A completion is untrusted: ``printable`` escapes what could control the terminal.


_COLOURS = {True: "green", False: "red", None: "default"}
_STYLES = ("cyan", "yellow", "magenta", "green", "blue")  # versions take them in turn


def group_lines(group: Sequence[Sample]) -> Iterator[Text]:
    """Yield the lines for a prompt of a train step and its episodes."""
    first = group[0]
    yield Text()
    yield Text(
        f"ticket {first.ticket_id} attempt {first.attempt}: prompt {first.prompt_index}, seed {first.seed}, granted at "
        f"v{first.granted_version}, {first.worker}, {first.seconds:.2f} s",
        style="bold",
    )
    yield Text("prompt     ").append(printable(first.prompt))
    if first.reference is not None:
        yield Text("reference  ").append(printable(first.reference))
    for sample in group:
        if sample.prompt != first.prompt:  # a row that begins with another history
            yield Text("  from  ").append(printable(sample.prompt), style="dim")
        parts = [f"reward {sample.reward:g}", VERDICTS[sample.correct], sample.finish_reason]
        parts += [f"{name} {sample.metrics[name]:g}" for name in worth_showing(sample.metrics)]
        parts += [f"reward {reward:g} at {position}" for position, reward in sample.rewards]
        if sample.score is not None:
            parts.append(f"score {sample.score:+.3f}")
        parts.append(f"staleness {sample.staleness}")
        parts.append(f"advantage {_signed(sample.advantage)}")
        if sample.logprob_difference is not None:
            parts.append(f"|prox - behav| {sample.logprob_difference:.2e}")
        parts.append(" -> ".join(f"{server} ({tokens})" for server, tokens in sample.route) or "no server known")
        label = f"  {sample.sample_id.rpartition('/')[2]:>4}  "
        yield Text(label).append(", ".join(parts), style=_COLOURS[sample.correct])
        yield _answer(sample)


def problem_lines(group: Sequence[EvalSample]) -> Iterator[Text]:
    """Yield the lines of a problem of an evaluation and its completions."""
    first = group[0]
    yield Text()
    yield Text(f"problem {first.problem}", style="bold")
    yield Text("prompt     ").append(printable(first.prompt))
    yield Text("reference  ").append(printable(first.reference))
    for sample in group:
        facts = [VERDICTS[sample.correct], f"reward {sample.reward:g}", sample.finish_reason, f"{sample.tokens} tokens"]
        if sample.answer is not None:
            facts.append(f"answer {printable(sample.answer)}")
        facts += [f"{name} {sample.metrics[name]:g}" for name in worth_showing(sample.metrics)]
        versions = sorted({sample.version_min, sample.version_max})
        facts.append("v" + "-".join(map(str, versions)))
        yield Text(f"  {sample.sample:>4}  ").append(", ".join(facts), style=_COLOURS[sample.correct])
        yield Text(" " * 8).append(printable(sample.completion))


def dropped_lines(group: Sequence[SampleView]) -> Iterator[Text]:
    """Yield the lines of a group that was not trained, and its episodes."""
    first = group[0]
    yield Text()
    yield Text(f"ticket {first.row.group}: prompt {first.row.prompt_index}", style="bold")
    yield Text("prompt     ").append(printable(first.turns[0].text))
    yield Text("reference  ").append(printable(first.reference or "unknown"))
    for view in group:
        row = view.row
        reward = "no reward" if row.reward is None else f"reward {row.reward:g}"
        facts = [reward, VERDICTS[row.correct], row.finish_reason, f"{row.tokens} tokens", printable(row.outcome)]
        facts += [] if row.staleness is None else [f"{row.staleness} behind"]
        label = f"  {row.sample_id.rpartition('/')[2]:>4}  "
        yield Text(label).append(", ".join(facts), style=_COLOURS[row.correct])
        text = Text(" " * 8)
        for turn in view.turns[1:]:
            text.append(printable(turn.text), style="dim" if turn.kind == "context" else "")
        yield text


def printable(text: str) -> str:
    """Escape all characters but printable ones and line ends: a completion must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text).replace("\n", "\n" + " " * 8)


def _answer(sample: Sample) -> Text:
    text = Text(" " * 8)
    for span in sample.spans:
        if span.version is None:
            text.append("[context]", style="dim").append(printable(span.text), style="dim")
            continue
        style = _STYLES[span.version % len(_STYLES)]
        text.append(f"[v{span.version}]", style=f"dim {style}").append(printable(span.text), style=style)
    return text


def _signed(value: Any) -> str:
    return "unknown" if value is None else f"{value:+.4f}"

"""Say where the time of a trial's train steps went, who waits for whom, and what would help.

The trial is only read; it may be running.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realsys.launch.commands.options import add_json, add_newest_trial, add_steps, find_trial
from realsys.observe.percent import whole_percents
from realsys.observe.screen.terminal import print_trimmed
from realsys.observe.timeline.why import PARTS, WAITS, StepTime, WhyReport, explain

#: last steps that the table shows; --json has all of them
_SHOWN = 12
#: share of a step from which a part has its own column
_WORTH = 0.02
#: what a group does after its wait, for the mean life of a group
_AFTER = {"buffered": "it waited in the trainer for its batch", "trained": "it was trained"}


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    add_steps(parser)
    add_json(parser, "print the whole report as JSON")


def run(args: Namespace) -> int:
    """Print where the time of a trial went. Raises ConfigError if no train step has ended."""
    report = explain(find_trial(args.trial_dir), *(args.steps or (None, None)))
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(as_record(report))).decode() + "\n")
    else:
        print_report(Console(), report)
    return 0


def as_record(report: WhyReport) -> dict[str, object]:
    """Return the report as JSON's types."""
    return {
        "bottleneck": report.sentence,
        "seconds": report.time.seconds,
        "parts": report.time.parts,
        "waits": report.waits,
        "covered": report.covered,
        "servers": report.servers,
        "workers": report.workers,
        "life": report.life,
        "advice": report.advice,
        "steps": [
            {"step": time.step, "end": time.end, "seconds": time.seconds, "parts": time.parts, "waits": waits}
            for time, waits in report.steps
        ],
    }


def print_report(console: Console, report: WhyReport) -> None:
    """Print sentence, times, waits, use and advice."""
    print_trimmed(console, f"[bold]{report.sentence}[/]")
    steps = [time.step for time, _ in report.steps]
    console.print(
        f"\n{len(steps)} train steps, {steps[0]} to {steps[-1]}, {report.time.seconds:.1f} s", highlight=False
    )
    _print_shares(console, "the trainer", report.time.parts, report.time.percents, PARTS)
    if report.waits:
        title = f"it waits because its last group was here (from the spans of {report.covered} steps)"
        _print_shares(console, title, report.waits, report.wait_percents, WAITS)
    # parts that are small in all of the steps are one column, so that a row adds up to 100
    shown = report.steps[-_SHOWN:]
    used = [name for name in PARTS if any(time.share(name) >= _WORTH for time, _ in shown)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title="\nsteps, % of each", title_justify="left")
    for name in ("step", "s", *used, "rest"):
        table.add_column(name, justify="right")
    table.add_column("waits for", no_wrap=True)
    for time, waits in shown:
        parts = {name: time.parts[name] for name in used}
        shares = whole_percents(parts | {"rest": max(0.0, time.seconds - sum(parts.values()))}, time.seconds)
        table.add_row(str(time.step), f"{time.seconds:.2f}", *map(str, shares.values()), _most(time, waits))
    print_trimmed(console, table)
    _print_use(console, report)
    if report.life:
        percents = whole_percents(report.life, sum(report.life.values()))
        _print_shares(console, "a group, on average", report.life, percents, {**WAITS, **_AFTER})
    console.print("\n[bold]what would help[/]")
    for line in report.advice or ["nothing stands out"]:
        print_trimmed(console, escape(f"- {line}"))


def _print_shares(
    console: Console, title: str, parts: Mapping[str, float], percents: Mapping[str, int], meanings: Mapping[str, str]
) -> None:
    """Print the seconds of ``parts``, and their ``percents``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"\n{title}", title_justify="left")
    for name, justify in (("part", "left"), ("s", "right"), ("%", "right"), ("meaning", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, meaning in meanings.items():
        if parts.get(name, 0.0) >= 0.005:  # it is 0.00 otherwise
            table.add_row(name, f"{parts[name]:.2f}", str(percents[name]), meaning)
    table.add_row("sum", f"{sum(parts.values()):.2f}", str(sum(percents.values())), style="dim")
    print_trimmed(console, table)


def _most(time: StepTime, waits: Mapping[str, float]) -> str:
    """Name the largest part of a step's wait."""
    if not waits or time.share("wait") < 0.01:
        return ""
    name = max(waits, key=lambda name: waits[name])
    return f"{name} {100 * waits[name] / time.parts['wait']:.0f} %"


def _print_use(console: Console, report: WhyReport) -> None:
    if not report.covered:
        console.print("\nno spans of these steps: they are too old, or telemetry.spans=false", highlight=False)
        return
    servers, workers = report.servers, report.workers
    if not servers.servers and not workers.workers:  # a run without servers
        return
    lines = [
        f"{_count(servers.servers, 'server')}: busy {servers.busy:.0%} of the time, {servers.running:.1f} completions "
        f"at a time (at most {servers.most}), {servers.queued:.1f} wait; paused for weights {servers.paused:.1%}",
        f"{_count(workers.workers, 'RolloutWorker')}: {workers.playing:.1f} groups at a time, room for "
        f"{workers.empty:.1f} more that got no ticket",
    ]
    if workers.reasons:
        lines[-1] += f" ({', '.join(f'{name} {count} times' for name, count in sorted(workers.reasons.items()))})"
    print_trimmed(console, "\n" + "\n".join(lines))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

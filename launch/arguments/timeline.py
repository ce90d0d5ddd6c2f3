"""Commands that show where the time of a trial goes: trace, why."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from realsys.launch.arguments.base import Command, add_json, add_newest_trial


def _steps(text: str) -> tuple[int | None, int | None]:
    """Read A:B, A:, :B or N as first and last step."""
    first, colon, last = text.partition(":")
    try:
        begin, end = (int(part) if part else None for part in (first, last if colon else first))
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: must be A:B, A:, :B or N") from None
    return begin, end


def _add_steps(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=_steps, metavar="A:B", help="from train step A to B (default: all)")


def _add_trace(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: %(default)s; .gz compresses it"
    )
    _add_steps(parser)
    parser.add_argument("--ticket", default="", metavar="ID", help="only this ticket, from its grant to its weights")


def _trace(args: Namespace) -> int:
    from realsys.launch.commands.timeline import trace

    return trace(args.trial_dir, args.out, args.steps, args.ticket)


def _add_why(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    _add_steps(parser)
    add_json(parser, "print the whole report as JSON")


def _why(args: Namespace) -> int:
    from realsys.launch.commands.timeline import why

    return why(args.trial_dir, args.steps, as_json=args.json)


COMMANDS = (
    Command(
        "why",
        "say who waits for whom in a trial, and what would help",
        _add_why,
        _why,
        "Say where the time of a trial's train steps went, who waits for whom, and what would help. The trial is only "
        "read; it may be running.",
    ),
    Command(
        "trace",
        "write the timeline of a trial for ui.perfetto.dev",
        _add_trace,
        _trace,
        "Write the spans of all processes of a trial as one file for ui.perfetto.dev, on one clock. Arrows follow each "
        "episode through the processes. The trial is only read; it may be running.",
    ),
)

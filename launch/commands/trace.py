"""Write the spans of all processes of a trial as one file for ui.perfetto.dev, on one clock.

Arrows follow each episode through the processes. The trial is only read; it may be running.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from realsys.launch.commands.options import add_newest_trial, add_steps, find_trial
from realsys.observe.timeline.perfetto import Wanted, write_trace


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: %(default)s; .gz compresses it"
    )
    add_steps(parser)
    parser.add_argument("--ticket", default="", metavar="ID", help="only this ticket, from its grant to its weights")


def run(args: Namespace) -> int:
    """Write the timeline of a trial and print its size. Raises ConfigError, OSError."""
    written = write_trace(find_trial(args.trial_dir), args.out, Wanted(args.steps, args.ticket))
    say = Console().print
    what = f"{written.spans:,} spans of {written.processes} processes over {written.seconds:.0f} s"
    say(f"{args.out}: {what}; open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    if written.clock_error is None:
        say("the clock of a host could not be compared: its spans have its own time", highlight=False, soft_wrap=True)
    elif written.clock_error:
        say(f"clocks of hosts agree within {1000 * written.clock_error:.1f} ms", highlight=False, soft_wrap=True)
    if written.lost or written.unread:
        say(f"{written.lost} spans were lost, {written.unread} lines are not complete", highlight=False, soft_wrap=True)
    return 0

"""The `realsys` command: the table of its commands, and the exit codes.

Arguments are parsed before heavy imports, so that --help is fast (`realsys.launch.arguments`).

Exit codes: 0 done, 1 the run failed, 2 bad input or an unusable file (one line on stderr), 3 an agent found no
launcher, 4 a lost node got no other machine, 130 Ctrl-C, 138 SIGUSR1 (SLURM's time limit comes near), 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from realsys.launch.arguments import planning, records, runs, timeline, trials
from realsys.launch.arguments.base import Command

#: commands that the launcher does not know: nothing imports the lab but this table
LAB = "realsys.lab.commands"
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_CTRL_C = 0, 1, 2, 130

#: every command, in the order of `realsys --help`
COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        *runs.COMMANDS,
        *trials.COMMANDS,
        *records.COMMANDS,
        *timeline.COMMANDS,
        *planning.COMMANDS,
        *import_module(LAB).COMMANDS,
        runs.NODE_AGENT,
    )
}

_EXAMPLES = """\
examples:
  realsys run experiment=arith                      a whole run on two CPU cores
  realsys run experiment=arith train.total_steps=5  set any configuration field
  realsys run experiment=math model.path=DIR data.train=FILE --dry-run
                                                    check model and data only
  realsys status --watch                            newest trial under runs/
  realsys resume arith/mine rollout.workers=4       continue a trial
"""


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Make the parser of `realsys`, and return those of its commands with it."""
    parser = argparse.ArgumentParser(
        prog="realsys",
        description="Asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=16),
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS.values():
        own = commands.add_parser(
            command.name, help=command.help, description=command.description or f"{command.help.capitalize()}."
        )
        command.add(own)
    return parser, commands.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `realsys` command; returns the exit code."""
    # No command computes, and a BLAS with threads would keep `preload` from forking.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser, parsers = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks which words may follow
        from realsys.launch.arguments.completion import complete

        complete(parser, parsers)
    words = sys.argv[1:] if argv is None else list(argv)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command {_meant(words[:1], COMMANDS)}: see realsys --help")
    args, rest = parser.parse_known_args(words)
    command = COMMANDS.get(args.command)
    if rest:
        # argparse takes positional arguments in one piece only, and users write overrides on both sides of an option.
        unknown = [text for text in rest if text.startswith("-")]
        if unknown or command is None or not command.takes_overrides:
            own = parsers.get(args.command, parser)
            options = [text for action in own._actions for text in action.option_strings]
            own.error(f"unknown argument: {_meant(unknown or rest, options)}")
        args.overrides += rest
    if args.version:
        from realsys import __version__

        print(f"realsys {__version__}")
        return EXIT_OK
    args.own_process = argv is None
    if command is None:
        parser.print_help()
        return EXIT_OK
    return _run(command, args)


def _meant(words: Sequence[str], known: Iterable[str]) -> str:
    """Return the words, each with the known word that it is like: `--dryrun (did you mean --dry-run?)`."""
    names = list(known)
    likely = {word: difflib.get_close_matches(word, names, n=1) for word in words}
    return " ".join(f"{word} (did you mean {close[0]}?)" if close else word for word, close in likely.items())


def _run(command: Command, args: argparse.Namespace) -> int:
    """Run a command; an error becomes one line and an exit code."""
    from realsys.errors import RealsysError

    try:
        return command.run(args)
    except RealsysError as exc:
        print(f"realsys: {exc}", file=sys.stderr)
        return exc.exit_code
    except BrokenPipeError:  # the reader of the output has ended: `realsys list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the exit must not fail
        return EXIT_OK
    except OSError as exc:
        print(f"realsys: {exc.filename or command.name}: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("realsys: stopped", file=sys.stderr)
        return EXIT_CTRL_C


if __name__ == "__main__":
    sys.exit(main())

"""The `realsys` command: the table of its commands, and the exit codes.

    words ──> the module of the command ──add_arguments──> its parser ──run(args)──> exit code

Only the module of the named command is imported, so that `realsys --help` is fast. Its docstring, up to the drawing, is
the description in `realsys COMMAND --help`. A command with the argument ``overrides`` takes words before and after its
options. To add a command: write a module with ``add_arguments`` and ``run``, and put it into the table. ``run`` raises
RealsysError or OSError, which becomes one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 bad input or an unusable file (one line on stderr), 3 an agent found no
launcher, 4 a lost node got no other machine, 130 Ctrl-C, 138 SIGUSR1 (SLURM's time limit comes near), 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_CTRL_C = 0, 1, 2, 130

_COMMANDS, _LAB = "realsys.launch.commands", "realsys.lab"
#: every command, in the order of `realsys --help`: its module, found by name, and its line there. Nothing else knows
#: the lab
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": (f"{_COMMANDS}.run", "run a trial"),
    "chain": (f"{_COMMANDS}.chain", "run stages that start from each other: sft.yaml rm.yaml ppo.yaml"),
    "serve": (f"{_COMMANDS}.serve", "train and sample for clients of the Tinker protocol"),
    "resume": (f"{_COMMANDS}.resume", "continue a trial with its own settings"),
    "init": (f"{_COMMANDS}.init", "write a training loop to start from"),
    "submit": ("realsys.launch.slurm.submit", "run a trial as a SLURM job"),
    "eval": (f"{_COMMANDS}.evaluate", "evaluate a model, a trial, or a trial that runs"),
    "play": (f"{_COMMANDS}.play", "play some tasks with your agent and verifier, without training"),
    "list": (f"{_COMMANDS}.list_trials", "show the trials of a folder"),
    "status": (f"{_COMMANDS}.status", "show a running or finished trial"),
    "view": (f"{_COMMANDS}.view", "show a trial and its samples in a browser"),
    "compare": (f"{_COMMANDS}.compare", "compare trials: settings, results, curves"),
    "export": (f"{_COMMANDS}.export", "write the weights of a trial as a Hugging Face folder"),
    "stop": (f"{_COMMANDS}.stop", "stop a trial with a checkpoint"),
    "logs": (f"{_COMMANDS}.logs", "show the log of a process, or list the logs of a trial"),
    "audit": (f"{_COMMANDS}.audit", "check that no ticket of a trial was lost or used twice"),
    "gc": (f"{_COMMANDS}.gc", "list what ended trials left, and remove it"),
    "replay": (f"{_COMMANDS}.replay", "repeat a recorded train step and compare it bit for bit"),
    "samples": (f"{_COMMANDS}.samples", "show samples of a train step or an evaluation"),
    "why": (f"{_COMMANDS}.why", "say who waits for whom in a trial, and what would help"),
    "trace": (f"{_COMMANDS}.trace", "write the timeline of a trial for ui.perfetto.dev"),
    "doctor": (f"{_COMMANDS}.doctor", "check this machine: packages, GPUs, limits, programs"),
    "config": (f"{_COMMANDS}.config", "print the configuration of a run, start nothing"),
    "data": (f"{_COMMANDS}.data", "check a data set"),
    "completion": (f"{_COMMANDS}.completion", "print the script that completes words in a shell"),
    "plan": (f"{_LAB}.plan", "predict throughput from a recorded run, recommend a split"),
    "simulate": (f"{_LAB}.simulate", "run the decisions of a trial on a virtual clock"),
    "sweep": (f"{_LAB}.sweep", "run a trial for each combination of listed values"),
    "regrade": (f"{_LAB}.regrade", "judge the recorded samples of a trial again"),
    "node-agent": ("realsys.launch.nodes.node_agent", "start processes of a trial that another machine runs"),
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


def make_parser(named: str | None = None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """Make the parser of `realsys`; return it and that of the ``named`` command, the only one with its arguments."""
    parser = argparse.ArgumentParser(
        prog="realsys",
        description="Asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=16),
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    own = None
    for name, (module, help) in COMMANDS.items():
        if name != named:
            commands.add_parser(name, help=help)
            continue
        command = import_module(module)
        own = commands.add_parser(name, help=help, description=_description(command))
        command.add_arguments(own)
    return parser, own


def _description(command: ModuleType) -> str:
    """Return the docstring up to its drawing as one paragraph."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return " ".join(" ".join(itertools.takewhile(lambda text: "──" not in text, paragraphs)).split())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `realsys` command; returns the exit code."""
    # No command computes, and a BLAS with threads would keep `preload` from forking.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    completes = "_ARGCOMPLETE" in os.environ  # a shell asks which words may follow
    words = sys.argv[1:] if argv is None else list(argv)
    typed = os.environ.get("COMP_LINE", "").split()[1:] if completes else words
    named = next((word for word in typed if not word.startswith("-")), None)
    try:
        parser, own = make_parser(named)
    except KeyboardInterrupt:
        return _stopped()
    if completes:
        from realsys.launch.commands.completion import complete

        complete(parser, own)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command {_meant(words[:1], COMMANDS)}: see realsys --help")
    args, rest = parser.parse_known_args(words)
    if rest:
        # argparse takes positional arguments in one piece only, and users write overrides on both sides of an option.
        unknown = [text for text in rest if text.startswith("-")]
        if unknown or not hasattr(args, "overrides"):
            shown = own or parser
            options = [text for action in shown._actions for text in action.option_strings]
            shown.error(f"unknown argument: {_meant(unknown or rest, options)}")
        args.overrides += rest
    if args.version:
        from realsys import __version__

        print(f"realsys {__version__}")
        return EXIT_OK
    args.own_process = argv is None
    if args.command is None:
        parser.print_help()
        return EXIT_OK
    return _run(args)


def _meant(words: Sequence[str], known: Iterable[str]) -> str:
    """Return the words, each with the known word that it is like: `--dryrun (did you mean --dry-run?)`."""
    names = list(known)
    likely = {word: difflib.get_close_matches(word, names, n=1) for word in words}
    return " ".join(f"{word} (did you mean {close[0]}?)" if close else word for word, close in likely.items())


def _run(args: argparse.Namespace) -> int:
    """Run a command; an error becomes one line and an exit code."""
    from realsys.errors import RealsysError

    try:
        return int(import_module(COMMANDS[args.command][0]).run(args))
    except RealsysError as exc:
        print(f"realsys: {exc}", file=sys.stderr)
        return exc.exit_code
    except BrokenPipeError:  # the reader of the output has ended: `realsys list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the exit must not fail
        return EXIT_OK
    except OSError as exc:
        print(f"realsys: {exc.filename or args.command}: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return _stopped()


def _stopped() -> int:
    print("realsys: stopped", file=sys.stderr)
    return EXIT_CTRL_C


if __name__ == "__main__":
    sys.exit(main())

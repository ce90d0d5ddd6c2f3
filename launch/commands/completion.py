"""Print the script for a shell that completes commands, options, fields of the configuration and trials.

Put eval "$(realsys completion bash)" into the start file of the shell.

    shell, at TAB ──> realsys with _ARGCOMPLETE=1 ──> words that begin like the last one

The package argcomplete does it. Nothing of it is imported in other calls.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script that makes a shell ask realsys for completions."""
    import argcomplete

    print(argcomplete.shellcode(["realsys"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser, command: argparse.ArgumentParser | None) -> None:
    """Answer the shell and exit, if it asks for completions. ``command``: parser of the command in its words."""
    import argcomplete

    completers = {"overrides": _overrides, "trial_dir": _trials, "trial_dirs": _trials, "process": _processes}
    for action in command._actions if command is not None else ():
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _overrides(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return fields and groups as ``name=``; behind the ``=`` the values that have a name."""
    from realsys.config.compose import config_groups, fields, literal_choices

    groups = config_groups(getattr(parsed_args, "config_dir", None))
    name, equals, text = prefix.partition("=")
    if not equals:
        return [f"{field}=" for field in (*groups, *fields(arguments=True)) if field.startswith(prefix)]
    head = "".join(text.rpartition(",")[:2]) if parsed_args.command == "sweep" else ""  # lists of values
    return [f"{name}={head}{value}" for value in groups.get(name) or literal_choices(name)]


def _trials(prefix: str, **_: Any) -> list[str]:
    """Return EXPERIMENT/TRIAL of all trials under runs/, and folders."""
    from argcomplete.completers import DirectoriesCompleter

    named = [f"{path.parent.parent.name}/{path.parent.name}" for path in Path("runs").glob("*/*/config.json")]
    return [*named, *DirectoriesCompleter()(prefix)]


def _processes(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    from realsys.errors import RealsysError
    from realsys.launch.commands.options import find_trial

    try:
        logs = find_trial(parsed_args.trial_dir).logs
    except RealsysError:
        return []
    return ["job", *("/".join(path.stem.rsplit("-", 1)) for path in logs.glob("*-*.log"))]

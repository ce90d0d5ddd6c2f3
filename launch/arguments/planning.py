"""Commands that start nothing and need no trial: config, data, simulate, completion."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from realsys.launch.arguments.base import Command, add_config_dir, add_json


def _add_data(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="read a data set as a run would, and report what is in it",
        description="Read a data set as a run would. Print counts, lengths, duplicates, train prompts that are like "
        "held-out ones, and the first prompt as the model gets it. Exit code 2 if a row is bad; each is one line.",
    )
    check.add_argument("source", metavar="SOURCE", help="file, folder or reasoning_gym:NAME, as in data.train")
    check.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="model.path=DIR, data.eval=FILE, data.layout=NAME, ..."
    )


def _data(args: Namespace) -> int:
    from realsys.launch.commands.data import check_data_set

    return check_data_set(args.source, args.overrides)


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="WORD", help="overrides as for run, or the folder of a trial and changes"
    )
    parser.add_argument(
        "--diff", action="store_true", help="print overrides: what differs from the defaults or the experiment"
    )
    add_json(parser, "print JSON instead of YAML")
    add_config_dir(parser, "your configuration files, as for run")


def _config(args: Namespace) -> int:
    from realsys.launch.commands.config import show_config

    return show_config(args.overrides, args.config_dir, diff=args.diff, as_json=args.json)


def _add_completion(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _completion(args: Namespace) -> int:
    from realsys.launch.arguments.completion import print_script

    return print_script(args.shell)


COMMANDS = (
    Command(
        "config",
        "print the configuration of a run, start nothing",
        _add_config,
        _config,
        "Print the configuration that a run with these overrides would have, with all settings that are chosen for "
        "this machine; or that of a trial. Nothing is checked beyond the settings, and nothing is started.",
        takes_overrides=True,
    ),
    Command("data", "check a data set", _add_data, _data, "Commands for data sets.", takes_overrides=True),
    Command(
        "completion",
        "print the script that completes words in a shell",
        _add_completion,
        _completion,
        'Print the script for a shell: eval "$(realsys completion bash)" in its start file completes commands, '
        "options, fields of the configuration and trials.",
    ),
)

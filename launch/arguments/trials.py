"""Commands that find a trial by its folder, from any node that sees it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from realsys.launch.arguments.base import NEWEST, Command, add_json, add_newest_trial, add_trial, count, seconds


def _add_list(parser: ArgumentParser) -> None:
    parser.add_argument(
        "fileroot", nargs="?", type=Path, default=Path("runs"), metavar="FILEROOT", help="default: runs"
    )
    add_json(parser, "print a JSON list")


def _list(args: Namespace) -> int:
    from realsys.launch.commands.listing import list_trials

    return list_trials(args.fileroot, as_json=args.json)


def _add_compare(parser: ArgumentParser) -> None:
    parser.add_argument("trial_dirs", nargs="+", type=Path, metavar="TRIAL_DIR", help="two or more folders of trials")


def _compare(args: Namespace) -> int:
    from realsys.launch.commands.compare import compare_trials

    return compare_trials(args.trial_dirs)


def _add_export(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step (default: the last)")


def _export(args: Namespace) -> int:
    from realsys.launch.commands.export import export_model

    return export_model(args.trial_dir, args.out, args.step)


def _add_status(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    add_json(parser, "print one JSON object (docs/cli.md)")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_watch_seconds,
        const=5.0,
        metavar="S",
        help="show it until the run ends; with --json, a line every S seconds (default: 5)",
    )


def _watch_seconds(text: str) -> float:
    try:
        return seconds(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; the trial is named before --watch") from None


def _status(args: Namespace) -> int:
    from realsys.launch.commands.status import show_status

    return show_status(args.trial_dir, as_json=args.json, watch_s=args.watch)


def _add_view(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")


def _view(args: Namespace) -> int:
    from realsys.launch.commands.view import view_trial

    return view_trial(args.trial_dir, args.port)


def _add_stop(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument(
        "--wait", type=seconds, default=600.0, metavar="S", help="seconds to wait for the end (default: %(default)g)"
    )


def _stop(args: Namespace) -> int:
    from realsys.launch.commands.stop import stop_trial

    return stop_trial(args.trial_dir, args.wait)


def _add_logs(parser: ArgumentParser) -> None:
    parser.add_argument(
        "process", nargs="?", metavar="PROCESS", help="model_worker/0, ..., or job: the screen of a job; or a trial"
    )
    parser.add_argument("--trial-dir", type=Path, metavar="DIR", help=NEWEST)
    parser.add_argument("-n", "--lines", type=count, default=50, metavar="N", help="last lines (default: %(default)s)")
    parser.add_argument("-f", "--follow", action="store_true", help="show new lines until the run ends")


def _logs(args: Namespace) -> int:
    from realsys.launch.commands.logs import show_logs

    return show_logs(args.trial_dir, args.process, args.lines, follow=args.follow)


def _add_gc(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", default=Path("runs"), help="a trial, or all trials of a fileroot"
    )
    parser.add_argument("--yes", action="store_true", help="remove what is listed")


def _gc(args: Namespace) -> int:
    from realsys.launch.commands.gc import collect_garbage

    return collect_garbage(args.folder, yes=args.yes)


def _add_audit(parser: ArgumentParser) -> None:
    add_trial(parser)
    add_json(parser, "print the whole report as JSON")


def _audit(args: Namespace) -> int:
    from realsys.launch.commands.audit import show_audit

    return show_audit(args.trial_dir, as_json=args.json)


COMMANDS = (
    Command("list", "show the trials of a folder", _add_list, _list),
    Command("status", "show a running or finished trial", _add_status, _status),
    Command(
        "view",
        "show a trial and its samples in a browser",
        _add_view,
        _view,
        "Serve the status page and the sample viewer of a trial on this machine, whether it runs or has ended. The "
        "trial is only read. Print the address, which has the key of the page; Ctrl-C ends the server.",
    ),
    Command(
        "compare",
        "compare trials: settings, results, curves",
        _add_compare,
        _compare,
        "Print the settings in which trials differ, their results, and their curves on one scale.",
    ),
    Command(
        "export",
        "write the weights of a trial as a Hugging Face folder",
        _add_export,
        _export,
        "Write the weights of a trial as a Hugging Face directory that refers to nothing else: the trained model, or "
        "any step of which the trial has a weight version or a checkpoint. The trial may be running.",
    ),
    Command("stop", "stop a trial with a checkpoint", _add_stop, _stop),
    Command("logs", "show the log of a process, or list the logs of a trial", _add_logs, _logs),
    Command("audit", "check that no ticket of a trial was lost or used twice", _add_audit, _audit),
    Command(
        "gc",
        "list what ended trials left, and remove it",
        _add_gc,
        _gc,
        "List what ended trials left: keys in the name store, half-written files, old weight versions, copies in "
        "shared memory. A trial that runs is left alone.",
    ),
)

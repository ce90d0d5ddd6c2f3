"""Commands that start processes: run, resume, submit, eval, play, and the agent of another machine."""

from __future__ import annotations

import socket
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from realsys.launch.arguments.base import Command, add_config_dir, add_newest_trial, count, preload_workers, seconds

if TYPE_CHECKING:
    from realsys.launch.run import RunOptions


def _add_run_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="experiment=NAME, group=OPTION or field.path=value"
    )
    parser.add_argument("--trial", metavar="NAME", help="name of the trial (default: date and time)")
    add_config_dir(parser, "your configuration files (DIR/experiment/*.yaml)")
    parser.add_argument(
        "--dry-run", action="store_true", help="check settings, data, model and machine, print the plan, start nothing"
    )


def add_run(parser: ArgumentParser) -> None:
    _add_run_options(parser)
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")


def run_options(args: Namespace, *, plain: bool) -> RunOptions:
    from realsys.launch.run import RunOptions

    return RunOptions(args.trial, args.config_dir, args.dry_run, plain=plain)


def _run(args: Namespace) -> int:
    from realsys.launch.run import run

    preload_workers(args)
    return run(args.overrides, run_options(args, plain=args.plain))


def _add_resume(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="changes: field.path=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")


def _resume(args: Namespace) -> int:
    from realsys.launch.commands.resume import resume_trial

    preload_workers(args)
    return resume_trial(*_trial_and_overrides(args), dry_run=args.dry_run, plain=args.plain)


def _trial_and_overrides(args: Namespace) -> tuple[Path | None, list[str]]:
    """Return the trial's folder, None without one, and the overrides: the first word may be either."""
    first = args.trial_dir
    if first is not None and "=" in str(first) and not first.exists():
        return None, [str(first), *args.overrides]
    return first, args.overrides


def _add_submit(parser: ArgumentParser) -> None:
    _add_run_options(parser)
    parser.add_argument("--detach", action="store_true", help="submit the job and return")


def _submit(args: Namespace) -> int:
    from realsys.launch.slurm.submit import SubmitOptions, submit_trial

    return submit_trial(args.overrides, SubmitOptions(run_options(args, plain=True), args.detach))


def _add_eval(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder of a model or trial, or EXPERIMENT/TRIAL of runs/")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="data.eval=FILE, evaluation.samples=8, ...")
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step of the trial (default: the last)")
    parser.add_argument("--live", action="store_true", help="ask the servers of a trial that runs; training goes on")
    parser.add_argument("--name", metavar="NAME", help="name of the evaluation (default: date and time)")
    add_config_dir(parser, "your configuration files, as for run")


def _evaluate(args: Namespace) -> int:
    from realsys.launch.commands.evaluate import evaluate
    from realsys.launch.evaluation_target import Choices

    preload_workers(args)
    return evaluate(args.target, Choices(args.overrides, args.config_dir, args.name), args.step, live=args.live)


def _add_play(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="+", metavar="WORD", help="folder of a model or trial, or model.path=DIR; and overrides"
    )
    parser.add_argument("--tasks", type=count, metavar="N", default=4, help="held-out tasks (default: %(default)s)")
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step of the trial (default: the last)")
    add_config_dir(parser, "your configuration files, as for run")


def _play(args: Namespace) -> int:
    from realsys.launch.commands.play import play
    from realsys.launch.evaluation_target import Choices

    return play(args.overrides, args.tasks, Choices(config_dir=args.config_dir), args.step)


def _add_node_agent(parser: ArgumentParser) -> None:
    parser.add_argument("--trial-dir", type=Path, metavar="DIR", required=True, help="folder of the trial, shared")
    parser.add_argument(
        "--node",
        metavar="NAME",
        default=socket.gethostname(),
        help="name of this machine, unique (default: its host name)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        default=600.0,
        help="seconds to wait for the launcher (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="end when the trial is started again")


def _node_agent(args: Namespace) -> int:
    from realsys.launch.nodes.node_agent import node_agent

    preload_workers(args)
    return node_agent(args.trial_dir, args.node, args.wait, once=args.once)


COMMANDS = (
    Command(
        "run",
        "run a trial",
        add_run,
        _run,
        "Run a trial, on this machine or over several (cluster.nodes): make its folder, start its processes, show and "
        "report it. The same command again continues a trial that was stopped.",
        takes_overrides=True,
    ),
    Command(
        "resume",
        "continue a trial with its own settings",
        _add_resume,
        _resume,
        "Continue a trial that was stopped or has failed, with the configuration in its folder and the changes that "
        "are given.",
        takes_overrides=True,
    ),
    Command(
        "submit",
        "run a trial as a SLURM job",
        _add_submit,
        _submit,
        "Check and plan a trial as run --dry-run does, submit it to SLURM, and follow it. The same command again "
        "continues a trial that was stopped.",
        takes_overrides=True,
    ),
    Command(
        "eval",
        "evaluate a model, a trial, or a trial that runs",
        _add_eval,
        _evaluate,
        "Evaluate on the data sets of the configuration and print a table (docs/evaluation.md). A model or a trial "
        "gets servers and RolloutWorkers of its own; nothing of them is left at the end.",
        takes_overrides=True,
    ),
    Command(
        "play",
        "play some tasks with your agent and verifier, without training",
        _add_play,
        _play,
        "Play held-out tasks one after the other, in one process. Print each conversation as it goes, the rows that "
        "would be trained, the reward, and errors with file and line. Exit code 1 if a task failed.",
        takes_overrides=True,
    ),
)

NODE_AGENT = Command(
    "node-agent",
    "start processes of a trial that another machine runs",
    _add_node_agent,
    _node_agent,
    "Run on each other machine of a trial: wait for its launcher, start and watch the processes that it orders, end "
    "all of them when the run ends or the launcher is gone.",
)

"""The `realsys` command. Arguments are parsed before heavy imports, so that --help is fast.

Exit codes: 0 done, 1 the run failed, 2 bad input or an unusable file (one line on stderr), 3 an agent found no
launcher, 4 a lost node got no other machine, 130 Ctrl-C, 138 SIGUSR1 (SLURM's time limit comes near), 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_CTRL_C = 0, 1, 2, 130

_EXAMPLES = """\
examples:
  realsys run experiment=arith                      a whole run on two CPU cores
  realsys run experiment=arith train.total_steps=5  set any configuration field
  realsys run experiment=math model.path=DIR data.train=FILE --dry-run
                                                    check model and data only
  realsys status                                    newest trial under runs/
"""
_NEWEST = "default: the newest trial under runs/"
_TRIAL = "folder of the trial"


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Make the parser of `realsys`, and return those of its commands with it."""
    parser = argparse.ArgumentParser(
        prog="realsys",
        description="Asynchronous reinforcement learning for language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a trial",
        description="Run a trial, on this machine or over several (cluster.nodes): make its folder, start its "
        "processes, show and report it. "
        "The same command again continues a trial that was stopped.",
    )
    _add_run_options(run)
    run.add_argument("--plain", action="store_true", help="one line per step instead of the live display")
    _add_submit(commands)
    _add_eval(commands)
    _add_record_commands(commands)
    _add_simulate(commands)
    _add_data(commands)
    audit = commands.add_parser("audit", help="check that no ticket of a trial was lost or used twice")
    audit.add_argument("trial_dir", type=Path, metavar="TRIAL_DIR", help=_TRIAL)
    audit.add_argument("--json", action="store_true", help="print the whole report as JSON")
    _add_gc(commands)
    _add_trial_commands(commands)
    _add_node_agent(commands)
    return parser, commands.choices


def _add_submit(commands: Any) -> None:
    submit = commands.add_parser(
        "submit",
        help="run a trial as a SLURM job",
        description="Check and plan a trial as run --dry-run does, submit it to SLURM, and follow it. The same command "
        "again continues a trial that was stopped.",
    )
    _add_run_options(submit)
    submit.add_argument("--detach", action="store_true", help="submit the job and return")


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model, a trial, or a trial that runs",
        description="Evaluate on the data sets of the configuration and print a table (docs/evaluation.md). A model "
        "or a trial gets servers and RolloutWorkers of its own; nothing of them is left at the end.",
    )
    evaluate.add_argument("target", metavar="TARGET", help="folder of a model or trial, or EXPERIMENT/TRIAL of runs/")
    evaluate.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="data.eval=FILE, evaluation.samples=8, ...")
    evaluate.add_argument("--step", type=int, metavar="N", help="weights of this step of the trial (default: the last)")
    evaluate.add_argument("--live", action="store_true", help="ask the servers of a trial that runs; training goes on")
    evaluate.add_argument("--name", metavar="NAME", help="name of the evaluation (default: date and time)")
    evaluate.add_argument("--config-dir", type=Path, metavar="DIR", help="your configuration files, as for run")


def _add_run_options(command: Any) -> None:
    command.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="experiment=NAME, group=OPTION or field.path=value"
    )
    command.add_argument("--trial", metavar="NAME", help="name of the trial (default: date and time)")
    command.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="your configuration files (DIR/experiment/*.yaml)"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="check settings, data, model and machine, print the plan, start nothing"
    )


def _add_gc(commands: Any) -> None:
    garbage = commands.add_parser(
        "gc",
        help="list what ended trials left, and remove it",
        description="List what ended trials left: keys in the name store, half-written files, old weight versions, "
        "copies in shared memory. A trial that runs is left alone.",
    )
    garbage.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", default=Path("runs"), help="a trial, or all trials of a fileroot"
    )
    garbage.add_argument("--yes", action="store_true", help="remove what is listed")


def _add_trial_commands(commands: Any) -> None:
    """Add the commands that find a trial by its folder, from any node that sees it."""
    listing = commands.add_parser("list", help="show the trials of a folder")
    listing.add_argument(
        "fileroot", nargs="?", type=Path, default=Path("runs"), metavar="FILEROOT", help="default: runs"
    )
    status = commands.add_parser("status", help="show a running or finished trial")
    stop = commands.add_parser("stop", help="stop a trial with a checkpoint")
    for command in (status, stop):
        command.add_argument("trial_dir", nargs="?", type=Path, metavar="TRIAL_DIR", help=_NEWEST)
    stop.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds to wait for the end (default: %(default)g)"
    )
    logs = commands.add_parser("logs", help="show the log of a process, or list the logs of a trial")
    logs.add_argument("process", nargs="?", metavar="PROCESS", help="model_worker/0, ..., or job: the screen of a job")
    logs.add_argument("--trial-dir", type=Path, metavar="DIR", help=_NEWEST)
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines (default: %(default)s)")
    logs.add_argument("-f", "--follow", action="store_true", help="show new lines until the run ends")


def _add_node_agent(commands: Any) -> None:
    agent = commands.add_parser(
        "node-agent",
        help="start processes of a trial that another machine runs",
        description="Run on each other machine of a trial: wait for its launcher, start and watch the processes "
        "that it orders, end all of them when the run ends or the launcher is gone.",
    )
    agent.add_argument("--trial-dir", type=Path, metavar="DIR", required=True, help="folder of the trial, shared")
    agent.add_argument(
        "--node",
        metavar="NAME",
        default=socket.gethostname(),
        help="name of this machine, unique (default: its host name)",
    )
    agent.add_argument(
        "--wait", type=float, metavar="S", default=600.0, help="seconds to wait for the launcher (default: %(default)g)"
    )
    agent.add_argument("--once", action="store_true", help="end when the trial is started again")


def _add_data(commands: Any) -> None:
    data = commands.add_parser("data", help="check a data set", description="Commands for data sets.")
    actions = data.add_subparsers(dest="action", metavar="ACTION", required=True)
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


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run the decisions of a trial on a virtual clock",
        description="Run manager, ledger, routing and buffer of a trial on a virtual clock, with cost models "
        "for servers, workers and trainer. Print throughput, waste and waits, and check all invariants.",
    )
    simulate.add_argument("scenario", metavar="SCENARIO", help="lognormal, pareto, faults or a YAML file")
    simulate.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="field.path=value; costs begin with sim.")
    simulate.add_argument("--hours", type=float, metavar="H", help="same as sim.steps=0 sim.hours=H")
    simulate.add_argument("--seed", type=int, metavar="N", help="same as seed=N")
    simulate.add_argument("--out", type=Path, metavar="DIR", help="write results.json and simulation.png here")
    simulate.add_argument("--json", action="store_true", help="print the measurements as JSON")


def _add_record_commands(commands: Any) -> None:
    """Add the commands that read the recorded steps of a trial."""
    replay = commands.add_parser("replay", help="repeat a recorded train step and compare it bit for bit")
    samples = commands.add_parser(
        "samples",
        help="show samples of a train step, or of an evaluation",
        description="Show the samples of a recorded train step with their rewards, or the completions of an evaluation "
        "(--eval).",
    )
    for command in (replay, samples):
        command.add_argument("trial_dir", type=Path, metavar="TRIAL_DIR", help=_TRIAL)
        command.add_argument("--step", type=int, metavar="N", help="default: the last recorded step")
    samples.add_argument("--ticket", metavar="ID", help="show only the prompt of this ticket")
    samples.add_argument(
        "--limit", type=int, metavar="N", help="prompts to show, 0: all (default: 4; with --json: all)"
    )
    samples.add_argument("--json", action="store_true", help="print one JSON object per sample")
    samples.add_argument(
        "--eval", nargs="?", const="", metavar="ID", help="show completions of this evaluation (default: the newest)"
    )
    samples.add_argument("--set", default="", metavar="NAME", help="with --eval: only this data set")
    samples.add_argument("--problem", type=int, metavar="N", help="with --eval: only this problem")
    verdicts = samples.add_mutually_exclusive_group()
    verdicts.add_argument(
        "--correct", dest="verdict", action="store_const", const=True, help="with --eval: only right completions"
    )
    verdicts.add_argument(
        "--wrong", dest="verdict", action="store_const", const=False, help="with --eval: only wrong completions"
    )
    _add_regrade(commands)


def _add_regrade(commands: Any) -> None:
    again = commands.add_parser(
        "regrade",
        help="judge the recorded samples of a trial again",
        description="Judge the recorded samples of a trial again, with its verifier or with another one, and report "
        "how often the verdict differs. The trial is only read; it may be running.",
    )
    again.add_argument("trial_dir", type=Path, metavar="TRIAL_DIR", help=_TRIAL)
    again.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="rollout.reward.FIELD=VALUE, rollout.environment=NAME, ..."
    )
    again.add_argument("--verifier", metavar="NAME", help="name or package.module:function (default: the trial's)")
    again.add_argument("--args", metavar="{...}", help="keyword arguments of the verifier, as data.verifier_args")
    again.add_argument("--step", type=int, metavar="N", help="default: all recorded steps")
    again.add_argument("--show", type=int, metavar="N", default=0, help="print the first N that disagree (default: 0)")
    again.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `realsys` command; returns the exit code."""
    parser, commands = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        # argparse takes positional arguments in one piece only, and users write overrides on both sides of an option.
        unknown = [text for text in rest if text.startswith("-")]
        if unknown or args.command not in ("run", "submit", "eval", "simulate", "data", "regrade"):
            commands.get(args.command, parser).error(f"unknown argument: {' '.join(unknown or rest)}")
        args.overrides += rest
    if args.version:
        from realsys import __version__

        print(f"realsys {__version__}")
        return EXIT_OK
    if args.command is None:
        parser.print_help()
        return EXIT_OK
    return _dispatch(args)


def _dispatch(args: argparse.Namespace) -> int:
    """Run a command; an error becomes one line and an exit code."""
    from realsys.errors import RealsysError

    try:
        return _run_command(args)
    except RealsysError as exc:
        print(f"realsys: {exc}", file=sys.stderr)
        return exc.exit_code
    except OSError as exc:
        print(f"realsys: {exc.filename or args.command}: {exc.strerror or exc}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("realsys: stopped", file=sys.stderr)
        return EXIT_CTRL_C


def _run_command(args: argparse.Namespace) -> int:
    """Import what the command needs, and run it. Returns the exit code. Raises RealsysError or OSError."""
    if args.command == "status":
        from realsys.launch.commands.status import show_status

        return show_status(args.trial_dir)
    if args.command == "list":
        from realsys.launch.commands.trials import list_trials

        return list_trials(args.fileroot)
    if args.command == "stop":
        from realsys.launch.commands.stop import stop_trial

        return stop_trial(args.trial_dir, args.wait)
    if args.command == "logs":
        from realsys.launch.commands.logs import show_logs

        return show_logs(args.trial_dir, args.process, args.lines, follow=args.follow)
    if args.command == "audit":
        from realsys.launch.commands.audit import show_audit

        return show_audit(args.trial_dir, as_json=args.json)
    if args.command == "gc":
        from realsys.launch.commands.gc import collect_garbage

        return collect_garbage(args.folder, yes=args.yes)
    if args.command == "simulate":
        from realsys.launch.commands.simulate import simulate

        hours = [] if args.hours is None else ["sim.steps=0", f"sim.hours={args.hours}"]
        seed = [] if args.seed is None else [f"seed={args.seed}"]
        return simulate(args.scenario, [*args.overrides, *hours, *seed], args.out, as_json=args.json)
    if args.command == "data":
        from realsys.launch.commands.data import check_data_set

        return check_data_set(args.source, args.overrides)
    if args.command == "node-agent":
        from realsys.launch.nodes.node_agent import node_agent

        return node_agent(args.trial_dir, args.node, args.wait, once=args.once)
    if args.command == "eval":
        from realsys.launch.evaluate.command import evaluate
        from realsys.launch.evaluate.eval_settings import Choices

        return evaluate(args.target, Choices(args.overrides, args.config_dir, args.name), args.step, live=args.live)
    if args.command in ("replay", "samples", "regrade"):
        return _run_record_command(args)
    from realsys.launch.run import RunOptions, run

    options = RunOptions(args.trial, args.config_dir, args.dry_run, plain=args.command == "submit" or args.plain)
    if args.command == "submit":
        from realsys.launch.commands.submit import SubmitOptions, submit_trial

        return submit_trial(args.overrides, SubmitOptions(options, args.detach))
    return run(args.overrides, options)


def _run_record_command(args: argparse.Namespace) -> int:
    """Run a command that reads recorded steps, as ``_run_command`` does."""
    if args.command == "replay":
        from realsys.launch.commands.replay import replay

        return replay(args.trial_dir, args.step)
    if args.command == "samples":
        if args.eval is not None:
            from realsys.launch.screen.evaluation_samples import Wanted, show_eval_samples

            wanted = Wanted(args.eval, args.set, args.problem, args.verdict, args.limit)
            return show_eval_samples(args.trial_dir, wanted, args.json)
        from realsys.launch.commands.samples import show_samples

        return show_samples(args.trial_dir, args.step, args.ticket, args.limit, args.json)
    from realsys.launch.regrade.regrade import RegradeOptions, regrade

    options = RegradeOptions(args.verifier, args.args, args.overrides, args.step, args.show, args.json)
    return regrade(args.trial_dir, options)


if __name__ == "__main__":
    sys.exit(main())

"""Commands for research: plan, simulate, sweep, regrade. `realsys.launch.cli` finds this module by its name."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from realsys.launch.arguments.base import Command, add_config_dir, add_json, add_trial, amount, count, hours
from realsys.launch.arguments.runs import add_run, run_options


def _add_plan(parser: ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="as for run; without experiment=: changes of the recorded run"
    )
    parser.add_argument(
        "--from", dest="folder", type=Path, metavar="DIR", required=True, help="folder of the trial to fit"
    )
    parser.add_argument(
        "--devices", type=count, metavar="N", help="devices to split; 0 or none: those of the allocation"
    )
    parser.add_argument(
        "--cores", type=amount, metavar="N", help="cores that all processes share; 0: each has a device of its own"
    )
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="OVERRIDES", help="predict this; may be repeated"
    )
    add_json(parser, "print the predictions as JSON")
    add_config_dir(parser, "your configuration files, as for run")


def _plan(args: Namespace) -> int:
    from realsys.lab.plan import PlanOptions, show_predictions

    options = PlanOptions(args.folder, args.config_dir, args.devices, args.cores, args.tries, args.json)
    return show_predictions(args.overrides, options)


def _add_simulate(parser: ArgumentParser) -> None:
    parser.add_argument("scenario", metavar="SCENARIO", help="lognormal, pareto, faults or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="field.path=value; costs begin with sim.")
    parser.add_argument("--hours", type=hours, metavar="H", help="same as sim.steps=0 sim.hours=H")
    parser.add_argument("--seed", type=int, metavar="N", help="same as seed=N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json and simulation.png here")
    add_json(parser, "print the measurements as JSON")


def _simulate(args: Namespace) -> int:
    from realsys.lab.simulate import simulate

    duration = [] if args.hours is None else ["sim.steps=0", f"sim.hours={args.hours}"]
    seed = [] if args.seed is None else [f"seed={args.seed}"]
    return simulate(args.scenario, [*args.overrides, *duration, *seed], args.out, as_json=args.json)


def _sweep(args: Namespace) -> int:
    from realsys.lab.sweep import sweep

    return sweep(args.overrides, run_options(args, plain=args.plain))


def _add_regrade(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="rollout.reward.FIELD=VALUE, rollout.environment=NAME, ..."
    )
    parser.add_argument("--verifier", metavar="NAME", help="name or package.module:function (default: the trial's)")
    parser.add_argument("--args", metavar="{...}", help="keyword arguments of the verifier, as data.verifier_args")
    parser.add_argument("--step", type=int, metavar="N", help="default: all recorded steps")
    parser.add_argument("--show", type=int, metavar="N", default=0, help="print the first N that disagree (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")


def _regrade(args: Namespace) -> int:
    from realsys.lab.regrade import RegradeOptions, regrade

    options = RegradeOptions(args.verifier, args.args, args.overrides, args.step, args.show, args.json)
    return regrade(args.trial_dir, options)


COMMANDS = (
    Command(
        "plan",
        "predict throughput from a recorded run, recommend a split",
        _add_plan,
        _plan,
        "Fit the cost model of realsys simulate to one recorded run. Predict the throughput of other splits, batch "
        "sizes, bounds on staleness and lengths, each with a 90 % interval, and recommend a split. Nothing is started.",
        takes_overrides=True,
    ),
    Command(
        "simulate",
        "run the decisions of a trial on a virtual clock",
        _add_simulate,
        _simulate,
        "Run manager, ledger, routing and buffer of a trial on a virtual clock, with cost models for servers, workers "
        "and trainer. Print throughput, waste and waits, and check all invariants.",
        takes_overrides=True,
    ),
    Command(
        "sweep",
        "run a trial for each combination of listed values",
        add_run,
        _sweep,
        "Run trials with different settings, one after the other, and compare them: field=A,B lists values, and each "
        "combination is a trial, whose name has its values behind --trial. All are checked before the first one "
        "starts. The same command again continues, and leaves complete trials alone.",
        takes_overrides=True,
    ),
    Command(
        "regrade",
        "judge the recorded samples of a trial again",
        _add_regrade,
        _regrade,
        "Judge the recorded samples of a trial again, with its verifier or with another one, and report how often the "
        "verdict differs. The trial is only read; it may be running.",
        takes_overrides=True,
    ),
)

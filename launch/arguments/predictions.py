"""The command plan."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from realsys.launch.arguments.base import Command, add_config_dir, add_json, amount, count


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
)

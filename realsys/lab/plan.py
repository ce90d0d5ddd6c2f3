"""Fit the cost model of realsys simulate to one recorded run, and recommend a split.

Predict the throughput of other splits, batch sizes, bounds on staleness and lengths, each with a 90 % interval. Nothing
is started.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from realsys.config.compose import compose, given_fields, with_overrides
from realsys.config.machine import Machine
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.lab.planner.cost_fit import FIT_SIMULATIONS, MEMBERS, fit, recorded_outcome
from realsys.lab.planner.parameters import Fit
from realsys.lab.planner.predictions import (
    PREDICT_SIMULATIONS,
    Prediction,
    Variant,
    devices_of,
    given,
    predict,
    recommend,
    split_variants,
    what_ifs,
)
from realsys.lab.planner.recorded_run import Recording, read_recording
from realsys.lab.planner.steady_state import check_apart
from realsys.launch.commands.options import add_config_dir, add_json, amount, count, find_trial
from realsys.launch.fit import fit as fit_config
from realsys.launch.prepare import resolve
from realsys.observe.screen.terminal import Terminal, WorkLine

_RECORDED = "as recorded"  # name of the first row


def add_arguments(parser: ArgumentParser) -> None:
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


def run(args: Namespace) -> int:
    """Print the predictions and the recommended split. Raises ConfigError."""
    if args.devices == 1:
        raise ConfigError("--devices", args.devices, "must be at least 2: one for a server and one for the trainer")
    recording = read_recording(find_trial(args.folder).root)
    check_apart(recording.config)
    config = _config(args.overrides, recording, args.config_dir)
    cores = _shared_cores(recording) if args.cores is None else args.cores
    devices = args.devices or (round(cores) if cores else devices_of(config))
    variants = split_variants(config, devices, cores)
    tries = given(config, args.tries) if args.tries else what_ifs(config)  # only their number counts yet
    work = _Work(variants, tries, as_json=args.json)
    work.begin(recording, cores)
    fitted = fit(recording, cores, work.simulated)
    splits = work.predict(fitted, variants)
    best = recommend(splits, devices=0 if cores else devices)
    work.head()
    others = work.predict(fitted, given(best.config, args.tries) if args.tries else what_ifs(best.config))
    work.line.clear()
    if args.json:
        found = {"splits": list(map(_plain, splits)), "recommended": best.label, "others": list(map(_plain, others))}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        return 0
    work.say(f"recommended: {best.label} ({best.bound}-bound)")
    return 0


def _config(overrides: Sequence[str], recording: Recording, config_dir: Path | None) -> Config:
    """Return the configuration to plan: composed as for a run if it names an experiment, else the recorded one."""
    if not any(text.lstrip("+").startswith("experiment=") for text in overrides):
        return with_overrides(recording.config, overrides)
    composed = resolve(compose(overrides, config_dir=config_dir), now=datetime.now())
    return fit_config(composed, given_fields(overrides, config_dir=config_dir), Machine.here())[0]


def _shared_cores(recording: Recording) -> float:
    """Return the cores that servers and ranks share: those of this machine, if the recorded trainer used no GPU."""
    return 0.0 if recording.gpus else float(Machine.here().planned(recording.config.cluster).cpus)


class _Work:
    """Simulations of the command: their progress on stderr, and a line on stdout as soon as a setting is predicted."""

    def __init__(self, variants: Sequence[Variant], tries: Sequence[Variant], *, as_json: bool) -> None:
        self.line = WorkLine("plan")
        self._total = FIT_SIMULATIONS + PREDICT_SIMULATIONS * (len(variants) + len(tries))
        self._done = 0
        self._doing = "fit"
        self._width = 0  # of the first column; the other columns are measured before it is known
        self._console = Terminal(highlight=False, markup=False, quiet=as_json)
        longest = max(len(label) for label in (_RECORDED, *(variant.label for variant in (*variants, *tries))))
        self._width = min(longest, max(0, self._console.width - len(self._row(*[""] * 5))))

    def say(self, text: str) -> None:
        """Print a result."""
        self.line.clear()
        self._console.print(text)
        self._console.file.flush()

    def simulated(self) -> None:
        """Count a simulation."""
        self._done += 1
        self.line.show(self._done, self._total, f"{self._done} of {self._total} simulations, {self._doing}")

    def begin(self, recording: Recording, cores: float) -> None:
        """Print the first row of the table, the recorded run itself, before anything is simulated."""
        shared = f"{cores:g} shared cores" if cores else "a device for each process"
        self.say(
            f"{recording.folder}: {len(recording.steps)} steps, {shared}; predictions with {1 + MEMBERS} sets of costs"
        )
        self.head()
        found = recorded_outcome(recording)
        self.say(
            self._row(_RECORDED, f"{found.steps_per_h:,.0f}", "", f"{found.tokens_per_s:,.0f}", f"{found.waits:.0%}")
        )

    def head(self) -> None:
        """Print the head of a table."""
        self.say(self._row("setting", "steps/h", "90 %", "tokens/s", "trainer waits"))

    def predict(self, fitted: Fit, variants: Sequence[Variant]) -> list[Prediction]:
        """Predict the settings and print each when it is ready."""
        predictions = []
        for variant in variants:
            self._doing = variant.label
            found = predict(fitted, variant.config, variant.label, scale=variant.scale, progress=self.simulated)
            steps, tokens = found.steps_per_h, found.tokens_per_s.mid
            interval = f"{steps.low:,.0f} - {steps.high:,.0f}"
            self.say(self._row(found.label, f"{steps.mid:,.0f}", interval, f"{tokens:,.0f}", f"{found.waits:.0%}"))
            predictions.append(found)
        return predictions

    def _row(self, label: str, steps: str, interval: str, tokens: str, waits: str) -> str:
        first = label if len(label) <= self._width else f"{label}\n{'':{self._width}}"
        return f"{first:<{self._width}}  {steps:>8}  {interval:>15}  {tokens:>9}  {waits:>13}"


def _plain(found: Prediction) -> dict[str, Any]:
    return {
        "setting": found.label,
        "steps_per_h": asdict(found.steps_per_h),
        "tokens_per_s": asdict(found.tokens_per_s),
        "trainer_waits": found.waits,
        "bound": found.bound,
    }

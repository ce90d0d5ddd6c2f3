"""`realsys plan`: predicts the throughput of a configuration and of its neighbours from one recorded run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from realsys.config.compose import compose, given_fields, with_overrides
from realsys.config.rules.machine import Machine
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.commands.trials.finding import find_trial
from realsys.launch.fit import fit as fit_config
from realsys.launch.prepare import resolve
from realsys.planner.cost_fit import MEMBERS, fit, recorded_outcome
from realsys.planner.parameters import Fit
from realsys.planner.predict import Prediction, predict
from realsys.planner.recorded_run import Recording, read_recording
from realsys.planner.splits import devices_of, recommend
from realsys.planner.variants import Variant, given, split_variants, what_ifs


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Arguments of the command. ``devices``, ``cores``: None for those of the configuration and of this machine."""

    folder: Path
    config_dir: Path | None
    devices: int | None
    cores: float | None
    tries: Sequence[str]
    as_json: bool


def show_predictions(overrides: Sequence[str], options: PlanOptions) -> int:
    """Print the predictions and the recommended split. Raises ConfigError."""
    _check(options)
    recording = read_recording(find_trial(options.folder).root)
    config = _config(overrides, recording, options.config_dir)
    cores = _shared_cores(recording) if options.cores is None else options.cores
    devices = options.devices or (round(cores) if cores else devices_of(config))
    variants = split_variants(config, devices, cores)
    fitted = fit(recording, cores, _progress("fit"))
    splits = _predicted(fitted, variants)
    best = recommend(splits, devices=0 if cores else devices)
    others = _predicted(fitted, given(best.config, options.tries) if options.tries else what_ifs(best.config))
    if sys.stderr.isatty():
        print("\r", end="\033[K", file=sys.stderr)
    if options.as_json:
        found = {"splits": list(map(_plain, splits)), "recommended": best.label, "others": list(map(_plain, others))}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        return 0
    _print(Console(highlight=False, markup=False), fitted, [splits, others], best)
    return 0


def _check(options: PlanOptions) -> None:
    if options.devices == 1:
        raise ConfigError("--devices", options.devices, "must be at least 2: one for a server and one for the trainer")


def _config(overrides: Sequence[str], recording: Recording, config_dir: Path | None) -> Config:
    """Return the configuration to plan: composed as for a run if it names an experiment, else the recorded one."""
    if not any(text.lstrip("+").startswith("experiment=") for text in overrides):
        return with_overrides(recording.config, overrides)
    composed = resolve(compose(overrides, config_dir=config_dir), now=datetime.now())
    return fit_config(composed, given_fields(overrides, config_dir=config_dir), Machine.here())[0]


def _shared_cores(recording: Recording) -> float:
    """Return the cores that servers and ranks share: those of this machine, if the recorded trainer used no GPU."""
    return 0.0 if recording.gpus else float(Machine.here().planned(recording.config.cluster).cpus)


def _predicted(fitted: Fit, variants: Sequence[Variant]) -> list[Prediction]:
    return [
        predict(fitted, variant.config, variant.label, scale=variant.scale, progress=_progress(variant.label))
        for variant in variants
    ]


def _progress(label: str) -> Callable[[], None]:
    done = 0

    def show() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{label[:60]}: {done} simulations\033[K", end="", file=sys.stderr, flush=True)

    return show


def _print(console: Console, fitted: Fit, tables: Sequence[Sequence[Prediction]], best: Prediction) -> None:
    measured = recorded_outcome(fitted.recording)
    shared = f"{fitted.cores:g} shared cores" if fitted.cores else "a device for each process"
    console.print(
        f"fitted to {fitted.recording.folder}, {len(fitted.recording.steps)} steps, {shared}: "
        f"{measured.steps_per_h:,.0f} steps/h, {measured.tokens_per_s:,.0f} tokens/s, "
        f"trainer waits {measured.waits:.0%}; {1 + MEMBERS} sets of costs"
    )
    for predictions in tables:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("setting", "steps/h", "90 %", "tokens/s", "trainer waits"):
            table.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
        for found in predictions:
            steps = found.steps_per_h
            table.add_row(
                found.label,
                f"{steps.mid:,.0f}",
                f"{steps.low:,.0f} - {steps.high:,.0f}",
                f"{found.tokens_per_s.mid:,.0f}",
                f"{found.waits:.0%}",
            )
        console.print(table)
    console.print(f"recommended: {best.label} ({best.bound}-bound)")


def _plain(found: Prediction) -> dict[str, Any]:
    return {
        "setting": found.label,
        "steps_per_h": asdict(found.steps_per_h),
        "tokens_per_s": asdict(found.tokens_per_s),
        "trainer_waits": found.waits,
        "bound": found.bound,
    }

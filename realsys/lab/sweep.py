"""Run trials with different settings, one after the other, and compare them.

``field=A,B`` lists values, and each combination is a trial, whose name has its values behind --trial. All are checked
before the first one starts. The same command again continues, and leaves complete trials alone.

    compose, check and plan every trial ──> for each: `realsys run` as a process ──> `realsys compare`
            an error ends the sweep                   a trial that fails is reported, and the next one starts

Each trial has its own process group, so that Ctrl-C on the terminal reaches only the sweep. The sweep hands each signal
on once: the trial stops as `realsys run` does, and no further one starts.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from realsys.cluster.process import own_environment
from realsys.config.dataflow import dataflow_of
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.trial_sizes import disk_bytes
from realsys.errors import ConfigError
from realsys.launch.commands.compare import compare_trials
from realsys.launch.commands.run import add_arguments as add_arguments
from realsys.launch.commands.run import run_options
from realsys.launch.launchers.contract import check_start
from realsys.launch.prepare import check_disk, complete_start, differences, examine
from realsys.launch.run import Planned, RunOptions, errors_name, host_of_launcher, plan_run
from realsys.launch.supervise.stop_request import stop_signals
from realsys.launch.words import command_line, own_words, words_again
from realsys.observe.screen.terminal import tell
from realsys.observe.screen.text_figures import aligned


@dataclass(frozen=True, slots=True)
class Checked:
    """A trial that can start. ``state``: for people. ``complete``: it has trained all its steps, and is left alone."""

    trial: SweepTrial
    config: Config
    paths: TrialPaths
    state: str
    complete: bool


def run(args: Namespace) -> int:
    """Run all trials. Returns the exit code of the first failure, 0 without any. Raises RealsysError for bad input."""
    overrides, options = args.overrides, run_options(args)
    named = [text.removeprefix("trial=") for text in overrides if text.startswith("trial=")]
    prefix = options.trial or (named[-1] if named else f"{datetime.now():%Y%m%d-%H%M%S}")
    trials = sweep_trials(overrides, prefix)
    print(f"checking {len(trials)} trials", flush=True)
    planned = [_plan(trial, options) for trial in trials]  # quick, so all come before the data is read
    checked = [_check(trial, plan) for trial, plan in zip(trials, planned, strict=True)]
    _check_room([each.config for each in checked if not each.paths.config.exists()])
    for line in aligned([[each.trial.name, str(each.trial), each.state] for each in checked]):
        print(line)
    if options.dry_run:
        return 0
    runs = Runs(options)
    codes = asyncio.run(runs.run_all(checked))
    failures = {name: code for name, code in codes.items() if code}
    if runs.signal or failures:
        complete = sum(each.complete for each in checked) + len(codes) - len(failures)
        again = command_line("sweep", *words_again(overrides, prefix, options)[1:])
        tell(f"realsys: {complete} of {len(checked)} trials are complete{_reasons(failures)}\n  to continue: {again}")
    if runs.signal:
        return 128 + runs.signal
    begun = [each.paths.root for each in checked if each.paths.config.exists()]
    if len(begun) > 1:
        print()
        compare_trials(begun)
    return next(iter(failures.values()), 0)


def _reasons(failures: Mapping[str, int]) -> str:
    return "".join(f"; {name} ended with exit code {code}" for name, code in failures.items())


def _plan(trial: SweepTrial, options: RunOptions) -> Planned:
    with errors_name(f"trial {trial}"):
        planned = plan_run(trial.overrides, replace(options, trial=trial.name))
        check_start(planned.config)
        host_of_launcher(planned.config)
    return planned


def _check(trial: SweepTrial, planned: Planned) -> Checked:
    """Make the checks of a start that read the trial's folder, its model and its data. Writes nothing."""
    config, paths = planned.config, planned.paths
    with errors_name(f"trial {trial}"):
        complete = complete_start(config, paths)
        start = complete or examine(config, paths, other_disk=config.cluster.nodes > 0).start
        # the number in a name may mean other values
        for change in start.changed:
            if any(f"{change.field}.".startswith(f"{key}.") for key in trial.settings):
                problem = f"trial {trial.name!r} was begun with {change.old!r}: choose another name with --trial"
                raise ConfigError(change.field, change.new, problem)
    if complete:
        return Checked(trial, config, paths, "; ".join(["complete already", *differences(start)]), complete=True)
    state = f"continues at step {start.step}" if paths.config.exists() else "new"
    return Checked(trial, config, paths, state, complete=False)


def _check_room(new: Sequence[Config]) -> None:
    """Check that the disk of this machine has room for all new trials together. Raises RealsysError."""
    here = [config for config in new if not config.cluster.nodes]
    if here:
        with errors_name(f"{len(here)} new trials together"):
            check_disk(here[0], sum(disk_bytes(config, dataflow_of(config)) for config in here))


class Runs:
    """Processes of the trials, one at a time. ``signal``: the first stop signal, 0 without one."""

    def __init__(self, options: RunOptions) -> None:
        self.signal = 0
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    async def run_all(self, checked: Sequence[Checked]) -> dict[str, int]:
        """Run the trials in order, until a stop signal. Returns the exit codes by name of the trial."""
        codes: dict[str, int] = {}
        with stop_signals(self._stop):
            for number, each in enumerate(checked, 1):
                if self.signal:
                    break
                if not each.complete:
                    print(f"\ntrial {number} of {len(checked)}: {each.trial.name}: {each.trial}", flush=True)
                    codes[each.trial.name] = await self._run(each.trial)
        return codes

    async def _run(self, trial: SweepTrial) -> int:
        words = [*own_words(), *words_again(trial.overrides, trial.name, self._options)]
        self._process = await asyncio.create_subprocess_exec(
            *words, env=own_environment(), stdin=subprocess.DEVNULL, process_group=0
        )
        if self.signal:  # it came while the process was made
            self._process.send_signal(self.signal)
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def _stop(self, signum: int) -> None:
        self.signal = self.signal or signum
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signum)


# ---- trials of a sweep: lists of values in the overrides, their combinations, and the name of each. Pure
#
# lr=1e-4,1e-3 seed=1,2  ──>  lr=1e-4 seed=1 | lr=1e-4 seed=2 | lr=1e-3 seed=1 | lr=1e-3 seed=2


_MOST_CHARACTERS = 64  # a longer name of a trial is refused (realsys.config.fields.Name)
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
#: settings that all trials of a sweep share
_SHARED = ("experiment", "trial", "fileroot", "recover")


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """One trial of a sweep. ``settings``: field or group -> its value in this trial, as the user wrote it.

    ``overrides``: of `realsys run`, without the name of the trial.
    """

    name: str
    settings: Mapping[str, str]
    overrides: Sequence[str]

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items())


def sweep_trials(overrides: Sequence[str], prefix: str) -> list[SweepTrial]:
    """Return a trial for each combination of the listed values; the last list varies fastest.

    ``prefix``: begin of the names. Raises ConfigError if no override lists values, or if one cannot be swept.
    """
    lists = [(text.partition("=")[0].lstrip("+"), split_values(text.partition("=")[2]), text) for text in overrides]
    swept = {key: values for key, values, _ in lists if len(values) > 1}
    if not swept:
        problem = "no setting has a list of values: write field=A,B, or use realsys run for one trial"
        raise ConfigError("sweep", " ".join(overrides), problem)
    counts = Counter(key for key, _, _ in lists)
    for key, values in swept.items():
        _check_list(key, values, counts[key])
    settings = [dict(zip(swept, combination, strict=True)) for combination in itertools.product(*swept.values())]
    shared = [(key, text) for key, _, text in lists if key != "trial"]
    return [
        SweepTrial(name, each, [f"{key}={each[key]}" if key in each else text for key, text in shared])
        for name, each in zip(_names(prefix, settings), settings, strict=True)
    ]


def split_values(text: str) -> list[str]:
    r"""Split ``text`` at each comma outside of brackets and quotes. A character behind a ``\`` separates nothing.

    Brackets and quotes that do not close are left to the error of the setting: then ``text`` is one value.
    """
    values, depth, quote, skip = [""], 0, "", False
    for char in text:
        if not (char == "," and depth == 0 and not quote and not skip):
            values[-1] += char
        else:
            values.append("")
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        else:
            depth += (char in _OPENING) - (char in _CLOSING)
    return values if depth == 0 and not quote else [text]


def _check_list(key: str, values: Sequence[str], count: int) -> None:
    text = ",".join(values)
    if key in _SHARED:
        raise ConfigError(key, text, "is the same for all trials of a sweep: name one value")
    if "" in values:
        raise ConfigError(key, text, "has an empty value: remove the comma, or write ''")
    if len(set(values)) < len(values):
        raise ConfigError(key, text, "has a value twice: name each once")
    if count > 1:
        raise ConfigError(key, text, "is set more than once: write all its values in one list")


def _names(prefix: str, settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Name the trials by their values, ``prefix-lr_1e-4-seed_2``; by numbers if such names are too long or equal."""
    last = Counter(key.rpartition(".")[2] for key in settings[0])
    labels = {key: short if last[short := key.rpartition(".")[2]] == 1 else key for key in settings[0]}
    told = ([f"{labels[key]}_{_plain(value)}" for key, value in each.items()] for each in settings)
    names = ["-".join([prefix, *each]) for each in told]
    if len(set(names)) == len(names) and max(map(len, names)) <= _MOST_CHARACTERS:
        return names
    digits = len(str(len(settings)))
    return [f"{prefix}-{number:0{digits}}" for number in range(1, len(settings) + 1)]


def _plain(value: str) -> str:
    """Return a value in characters that a name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", value).strip("_")

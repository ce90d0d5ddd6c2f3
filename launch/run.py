"""`realsys run`: compose, check, prepare, plan; then supervise and show until the end; then report."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from launch.display import View, make_view, print_plan
from launch.failures import FirstFailure, first_failure
from launch.monitor import Monitor
from launch.plan import ProcessSpec, plan
from launch.prepare import prepare, refuse_existing, resolve
from launch.progress import Progress
from launch.resume import check_resume
from launch.supervisor import Death, Outcome, Supervisor
from realsys.cluster.failure import read_errors
from realsys.config.checks import check
from realsys.config.compose import compose
from realsys.config.machine import Machine
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config

EXIT_BAD_INPUT = 2  # RealsysError.exit_code of ConfigError, DataError, ModelError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says besides the overrides."""

    trial: str | None = None
    config_dir: Path | None = None
    dry_run: bool = False
    plain: bool = False


def run(overrides: Sequence[str], options: RunOptions) -> int:
    """Run one trial on this machine and return the exit code. Raises RealsysError for bad input."""
    given = list(overrides)
    if options.trial is not None:
        escaped = options.trial.replace("\\", "\\\\").replace("'", "\\'")
        given.append(f"trial='{escaped}'")
    config = resolve(compose(given, config_dir=options.config_dir), now=datetime.now())
    machine = Machine.here()
    check(config, machine)
    run_id = f"{config.experiment}-{config.trial}-{uuid.uuid4().hex[:8]}"
    paths = TrialPaths.of(config)
    specs = plan(config, paths, machine, run_id, os.environ.get("PYTHONPATH", ""))
    console = Console()
    if options.dry_run:
        refuse_existing(paths, config)
        check_resume(config)
        print_plan(console, config, paths, specs)
        return 0
    console.print(f"trial [bold]{config.experiment}/{config.trial}[/] in {paths.root}", highlight=False, soft_wrap=True)
    prepare(config, lambda text: console.print(text, highlight=False, soft_wrap=True))
    return asyncio.run(_supervise(config, paths, specs, make_view(console, config, paths, plain=options.plain)))


async def _supervise(config: Config, paths: TrialPaths, specs: Sequence[ProcessSpec], view: View) -> int:
    """consumes the plan; waits for the supervisor, which ends with the run; produces the report."""
    started = time.time()
    progress = Progress()
    monitor = Monitor(config, paths, progress, view)

    def say(text: str) -> None:
        monitor.read_steps()  # what happened before is shown before
        view.note(text)

    supervisor = Supervisor(
        specs,
        stop_timeout_s=config.cluster.stop_timeout_s,
        max_restarts=config.cluster.max_restarts,
        say=say,
        hopeless=lambda death: _met_bad_input(death, paths),
    )
    with view:
        watching = asyncio.create_task(monitor.run())
        try:
            outcome = await supervisor.run()
        finally:
            watching.cancel()
            (trouble,) = await asyncio.gather(watching, return_exceptions=True)
            monitor.read_steps()
            if isinstance(trouble, Exception):  # a display that fails must not take the run with it, nor be silent
                view.note(f"the display stopped working: {type(trouble).__name__}: {trouble}")
    return _conclude(config, paths, progress, outcome, started)


def _met_bad_input(death: Death, paths: TrialPaths) -> bool:
    """Whether the process left word that the user's input is wrong: then it must not be restarted, but reported."""
    return any(e.pid == death.pid and e.exit_code == EXIT_BAD_INPUT for e in read_errors(paths.errors))


def _conclude(config: Config, paths: TrialPaths, progress: Progress, outcome: Outcome, started: float) -> int:
    """Write and print the report; returns the exit code."""
    from launch.report import print_summary, summarise, write_report

    failure = None
    if outcome.status == "failed":
        failure = first_failure(outcome, read_errors(paths.errors), paths.logs)
    summary = summarise(config, paths, progress, outcome, started=started, ended=time.time(), failure=failure)
    write_report(summary, progress, paths)
    if outcome.status == "failed":
        _print_failure(outcome, failure, paths)
        return failure.exit_code if failure else 1
    print_summary(Console(), summary)
    if outcome.status == "interrupted":
        print(f"realsys: {outcome.reason}; what was written is in {paths.root}", file=sys.stderr)
        return 128 + (outcome.signal or 2)
    return 0


def _print_failure(outcome: Outcome, failure: FirstFailure | None, paths: TrialPaths) -> None:
    """One line with the cause; then where it can be read, and its last lines."""
    lines: list[str] = []
    if failure is None:
        lines.append(f"realsys: the run failed: {outcome.reason}")
    else:
        lines.append(f"realsys: the run failed: {failure.process} (pid {failure.pid}): {failure.problem}")
        if outcome.reason != f"{failure.process} {failure.problem}":
            lines.append(f"  the run ended when {outcome.reason}")
        lines += [f"  last lines of {failure.log}:", *(f"  | {line}" for line in failure.log_tail)]
    lines.append(f"  logs: {paths.logs}   errors: {paths.errors}")
    print("\n".join(lines), file=sys.stderr)

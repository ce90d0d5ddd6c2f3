"""`realsys run`: compose, check, prepare, plan; then supervise and show until the end; then report.

The same command again goes on with a trial that was stopped or died (launch/recover.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from realsys.cluster.failure import read_errors
from realsys.config.compose import compose
from realsys.config.doors import LOSS
from realsys.config.paths import TrialPaths
from realsys.config.rules.checks import check
from realsys.config.rules.machine import Machine
from realsys.config.schema import Config
from realsys.launch.plan import ProcessSpec, plan
from realsys.launch.prepare import Ready, examine, find, prepare, refuse_taken_address, resolve
from realsys.launch.processes.failures import FirstFailure, first_failure
from realsys.launch.processes.logs import keep_bounded
from realsys.launch.processes.own_etcd import etcd_answers
from realsys.launch.processes.restart_policy import NO_CHECKPOINT, Outcome
from realsys.launch.processes.supervisor import Bounds, Hooks, Supervisor
from realsys.launch.recover import remove_half_written
from realsys.launch.resume import check_resume
from realsys.launch.screen.display import make_view, print_plan
from realsys.launch.screen.monitor import Monitor
from realsys.launch.screen.progress import Progress
from realsys.launch.screen.report import Summary, draw_curves, print_summary, summarise, write_summary
from realsys.telemetry.steps import StepTail
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints


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
    _try_own_loss(config)
    run_id = f"{config.experiment}-{config.trial}-{uuid.uuid4().hex[:8]}"
    paths = TrialPaths.of(config)
    specs = plan(config, paths, machine, run_id, os.environ.get("PYTHONPATH", ""))
    console = _Terminal()
    if options.dry_run:
        _dry_run(console, config, paths, specs)
        return 0
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    console.print(f"trial [bold]{config.experiment}/{config.trial}[/] in {paths.root}", highlight=False, soft_wrap=True)
    with prepare(config, say) as ready:
        started = time.time()
        outcome = asyncio.run(_supervise(config, ready, specs, console, plain=options.plain))
        with _reported("remove what was being written"):
            remove_half_written(paths)
        again = command_again(overrides, config.trial, options)
        code, summary = _conclude(config, paths, outcome, started, again)
    _draw(summary, paths)
    return code


def _try_own_loss(config: Config) -> None:
    """Compute a loss of the user on a trial batch. Raises ConfigError."""
    if config.train.ppo.loss not in LOSS.builtin:
        from realsys.algorithm.losses.trial import try_loss  # imports torch, which takes seconds

        try_loss(config.train.ppo)


class _Terminal(Console):
    """Goes on when nobody reads it any more: `realsys run | tee log` gets its Ctrl-C together with the tee."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nobody:
            os.dup2(nobody.fileno(), self.file.fileno())  # for what is flushed at the exit


def _tell(text: str) -> None:
    """On stderr."""
    _Terminal(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True, markup=False)


@contextlib.contextmanager
def _reported(action: str) -> Iterator[None]:
    """A disk that is full or read-only must not hide how the run ended."""
    try:
        yield
    except OSError as exc:
        _tell(f"realsys: cannot {action}: {exc.filename or 'the terminal'}: {exc.strerror}")


def _dry_run(console: Console, config: Config, paths: TrialPaths, specs: Sequence[ProcessSpec]) -> None:
    earlier = find(config, paths)
    refuse_taken_address(config)
    if earlier is None:
        check_resume(config)
    lines = [] if earlier is None else examine(config, paths, earlier)
    print_plan(console, config, paths, specs, lines)


def command_again(overrides: Sequence[str], trial: str, options: RunOptions) -> str:
    """The command that goes on with the trial, to be copied to a shell."""
    words = ["realsys", "run"]
    words += [text for text in overrides if text.partition("=")[0] not in ("trial", "recover")]
    words += ["--trial", trial]
    words += ["--config-dir", str(options.config_dir)] if options.config_dir else []
    words += ["--plain"] if options.plain else []
    return shlex.join(words)


async def _supervise(
    config: Config, ready: Ready, specs: Sequence[ProcessSpec], console: Console, *, plain: bool
) -> Outcome:
    """consumes the plan; waits for the supervisor, which ends with the run; produces its outcome."""
    paths, cluster = ready.paths, config.cluster
    progress, tail = Progress(), StepTail(paths.steps)
    progress.add(tail.records())  # of earlier runs of this trial: they count, and are not shown again
    view = make_view(console, config, paths, plain=plain)
    monitor = Monitor(config, paths, progress, view, tail)
    troubles: list[Exception] = []

    def say(text: str = "") -> None:
        try:
            monitor.read_steps()  # what happened before is shown before
            if text:
                view.note(text)
        except Exception as exc:  # of the display, or of the terminal behind it: the run goes on without them
            troubles.append(exc)

    def finished() -> bool:
        say()
        return progress.phase == "done"

    hooks = Hooks(
        say=say,
        errors=lambda: read_errors(paths.errors),
        checkpoint=lambda: _newest_step(paths),
        finished=finished,
        name_store_ready=lambda _: etcd_answers(cluster.name_store.address, cluster.connect_timeout_s),
    )
    bounds = Bounds(cluster.stop_timeout_s, cluster.master_stop_s, cluster.max_restarts)
    supervisor = Supervisor(specs, bounds, hooks, inherit=[ready.lock.fd])
    outcome, trouble, unbounded = Outcome("failed", "the display could not be opened"), None, None
    with _reported("show the run"), view:
        watching = asyncio.create_task(monitor.run())
        logs = [spec.log for spec in specs]
        bounding = asyncio.create_task(keep_bounded(logs, int(cluster.log_mb * 2**20)))
        try:
            outcome = await supervisor.run()
        finally:
            watching.cancel()
            bounding.cancel()
            trouble, unbounded = await asyncio.gather(watching, bounding, return_exceptions=True)
            say()
    for exc in [exc for exc in (trouble, *troubles) if isinstance(exc, Exception)][:1]:
        _tell(f"realsys: the display stopped working: {type(exc).__name__}: {exc}")
    if isinstance(unbounded, Exception):
        _tell(f"realsys: the logs were not bounded: {type(unbounded).__name__}: {unbounded}")
    return outcome


def _newest_step(paths: TrialPaths) -> int:
    complete = complete_checkpoints(paths.checkpoints)
    return complete[-1][0] if complete else NO_CHECKPOINT


def _conclude(config: Config, paths: TrialPaths, outcome: Outcome, started: float, again: str) -> tuple[int, Summary]:
    """Write and print the summary; returns the exit code, too. ``again``: the command that goes on."""
    failure = None
    if outcome.status == "failed":
        failure = first_failure(outcome, read_errors(paths.errors), paths.logs)
    summary = summarise(config, paths, outcome, started=started, ended=time.time(), failure=failure)
    with _reported("write the summary"):
        write_summary(summary, paths)
    if outcome.status == "failed":
        _print_failure(outcome, failure, paths, again)
        return failure.exit_code if failure else 1, summary
    print_summary(_Terminal(), summary)
    if outcome.status == "interrupted":
        _tell(f"realsys: {outcome.reason}; to go on: {again}")
        return 128 + (outcome.signal or 2), summary
    return 0, summary


def _draw(summary: Summary, paths: TrialPaths) -> None:
    """The picture comes when all is said, and the trial is free: to import matplotlib alone can take seconds."""
    try:
        if summary["steps"]:
            draw_curves(summary, paths)
    except KeyboardInterrupt:
        _tell(f"realsys: {paths.curves.name} is not drawn")
    except Exception as exc:  # whatever it is, the run has ended as it has
        _tell(f"realsys: {paths.curves} is not drawn: {type(exc).__name__}: {exc}")


def _print_failure(outcome: Outcome, failure: FirstFailure | None, paths: TrialPaths, again: str) -> None:
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
    lines.append(f"  to go on: {again}")
    _tell("\n".join(lines))

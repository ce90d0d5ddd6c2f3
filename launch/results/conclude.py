"""End of a run: its summary, its cause if it failed, the command that continues it, and its picture."""

from __future__ import annotations

import time

from realsys.cluster.failure import read_errors
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.nodes.base import EXIT_NO_MACHINE
from realsys.launch.processes.failures import FirstFailure, first_failure
from realsys.launch.processes.restart_policy import NO_CHECKPOINT, Outcome
from realsys.launch.results.report import Summary, print_summary, summarise, write_summary
from realsys.launch.results.saved_steps import saved_line
from realsys.observe.curves import draw_curves
from realsys.observe.screen.terminal import Terminal, reported, tell
from realsys.observe.step_log import surviving_steps
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints


def newest_step(paths: TrialPaths) -> int:
    """Return the step of the newest complete checkpoint, or NO_CHECKPOINT."""
    complete = complete_checkpoints(paths.checkpoints)
    return complete[-1][0] if complete else NO_CHECKPOINT


def conclude(config: Config, paths: TrialPaths, outcome: Outcome, started: float, again: str) -> tuple[int, Summary]:
    """Write and print the summary; return it with the exit code. ``again``: the command that continues the trial."""
    summary, failure = summarised(config, paths, outcome, started)
    if outcome.status == "failed":
        return report_failure(outcome, failure, paths, f"to continue: {again}"), summary
    print_summary(Terminal(), summary)
    if outcome.status == "interrupted":
        steps = (record["step"] for record in surviving_steps(paths.steps) if record["kind"] == "train")
        trained = max(steps, default=0)
        tell(f"realsys: {outcome.reason}; {saved_line(trained, newest_step(paths))}\n  to continue: {again}")
        return 128 + (outcome.signal or 2), summary
    return 0, summary


def summarised(
    config: Config, paths: TrialPaths, outcome: Outcome, started: float
) -> tuple[Summary, FirstFailure | None]:
    """Write the summary of a run that has ended. Returns it, with the first failure of a run that failed."""
    failure = None
    if outcome.status == "failed":
        failure = first_failure(outcome, read_errors(paths.errors), paths.logs)
    summary = summarise(config, paths, outcome, started=started, ended=time.time(), failure=failure)
    with reported("write the summary"):
        write_summary(summary, paths)
    return summary, failure


def draw(config: Config, paths: TrialPaths, steps: int) -> None:
    """Draw curves.png, last and without the lock on the trial: importing matplotlib alone can take seconds."""
    try:
        if steps and config.telemetry.curves_every_s:
            draw_curves(config, paths)
    except KeyboardInterrupt:
        tell(f"realsys: {paths.curves.name} is not drawn")
    except Exception as exc:  # a missing picture does not change how the run ended
        tell(f"realsys: {paths.curves} is not drawn: {type(exc).__name__}: {exc}")


def report_failure(outcome: Outcome, failure: FirstFailure | None, paths: TrialPaths, advice: str) -> int:
    """Print the cause in one line, then files with details, the last lines of the log and ``advice``.

    Returns the exit code.
    """
    lines: list[str] = []
    if failure is None:
        lines.append(f"realsys: the run failed: {outcome.reason}")
    else:
        lines.append(f"realsys: the run failed: {failure.process} (pid {failure.pid}): {failure.problem}")
        # "exited with code 1" says nothing that the cause has not said.
        if not outcome.reason.startswith(failure.process) or "," in outcome.reason:
            lines.append(f"  the run ended when {outcome.reason}")
        if failure.log_tail:
            lines += [f"  last lines of {failure.log}:", *(f"  | {line}" for line in failure.log_tail)]
    lines.append(f"  logs: {paths.logs}   errors: {paths.errors}")
    lines.append(f"  {advice}")
    tell("\n".join(lines))
    return EXIT_NO_MACHINE if outcome.no_machine else failure.exit_code if failure else 1

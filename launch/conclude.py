"""End of a run: its summary, its cause if it failed, the command that continues it, and its picture."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from realsys.cluster.files import file_stamp
from realsys.cluster.process import read_errors
from realsys.config.evaluation_sets import DEMOS, id_of_set
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.nodes.orders import EXIT_NO_MACHINE
from realsys.launch.supervise.failures import FirstFailure, first_failure
from realsys.launch.supervise.restart_policy import NO_CHECKPOINT, TrialOutcome
from realsys.observe.curves import draw_curves
from realsys.observe.evaluation_records import asked, further, headline, is_held_out, margin
from realsys.observe.percent import apportioned, percent, percentage
from realsys.observe.screen.progress import Record, mean, number, time_parts
from realsys.observe.screen.terminal import Terminal, reported, tell
from realsys.observe.screen.text_figures import failures_text, fmt, worth_showing
from realsys.observe.signal import signal_warning
from realsys.observe.step_log import surviving_steps
from realsys.observe.totals import Totals, averaged_ends
from realsys.train.checkpoint.checkpoint_files import complete_checkpoints


def newest_step(paths: TrialPaths) -> int:
    """Return the step of the newest complete checkpoint, or NO_CHECKPOINT."""
    complete = complete_checkpoints(paths.checkpoints)
    return complete[-1][0] if complete else NO_CHECKPOINT


def journal_bytes(paths: TrialPaths) -> int:
    """Return the size of the journals of a service's clients, which grow with each call, or NO_CHECKPOINT."""
    stamps = [file_stamp(path) for path in paths.clients.glob("*/journal")]
    return sum(size for _, _, size in filter(None, stamps)) or NO_CHECKPOINT


def conclude(
    config: Config, paths: TrialPaths, outcome: TrialOutcome, started: float, again: str
) -> tuple[int, Summary]:
    """Write and print the summary; return it with the exit code. ``again``: the command that continues the trial."""
    summary, failure = summarised(config, paths, outcome, started)
    if outcome.status == "failed":
        return report_failure(outcome, failure, paths, f"to continue: {again}"), summary
    print_summary(Terminal(), summary)
    if outcome.status == "interrupted":
        steps = (record["step"] for record in surviving_steps(paths.steps) if record["kind"] == "train")
        trained = max(steps, default=0)
        kept = "the runs of its clients are kept" if config.is_service else saved_line(trained, newest_step(paths))
        tell(f"realsys: {outcome.reason}; {kept}\n  to continue: {again}")
        return 128 + (outcome.signal or 2), summary
    return 0, summary


def summarised(
    config: Config, paths: TrialPaths, outcome: TrialOutcome, started: float
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


def report_failure(outcome: TrialOutcome, failure: FirstFailure | None, paths: TrialPaths, advice: str) -> int:
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


# ---- says in a line what a stopped run has kept. Pure


def saved_line(trained: int, saved: int) -> str:
    """Return a line that says how many of the ``trained`` steps are lost.

    ``saved``: step of the newest checkpoint, or NO_CHECKPOINT.
    """
    lost = trained - max(saved, 0)
    if not trained:
        return "no step was trained yet"
    if lost <= 0:
        return f"step {saved} is saved, no step is lost"
    steps = f"{lost} trained step{'s are' if lost > 1 else ' is'} lost"
    newest = "there is no checkpoint" if saved == NO_CHECKPOINT else f"the last checkpoint has step {saved}"
    return f"{steps}: {newest}"


# ---- reports a finished run from its step log: a summary on the terminal and summary.json


Summary = dict[str, Any]


EVALUATION_KEYS = (
    *("eval_id", "set", "step", "complete", "incomplete", "problems", "samples", "failed"),
    *("accuracy", "interval", "pass_at", "majority", "majority_omitted", "unjudged", "left_out_k"),
    *("reward_mean", "length_mean", "metrics", "version"),
)


_NAME = 20  # width of a fact's name


def summarise(
    config: Config,
    paths: TrialPaths,
    outcome: TrialOutcome,
    *,
    started: float,
    ended: float,
    failure: FirstFailure | None = None,
) -> Summary:
    """Return the results of a run as plain values; a number that was not measured is None."""
    totals = Totals.of(surviving_steps(paths.steps), since=started)
    seconds, accuracy = totals.phase_seconds(ended), _accuracy(totals)
    training_seconds, tokens_now = seconds.get("train"), totals.answer_tokens_now
    return {
        "experiment": config.experiment,
        "trial": config.trial,
        "status": outcome.status,
        "reason": outcome.reason,
        "ended_by": ended_by(config, totals) if outcome.status == "done" else None,
        "failure": None if failure is None else {"process": failure.process, "problem": failure.problem},
        "allocation": config.allocation,
        "steps": totals.steps,
        "steps_since_start": totals.steps_now,  # as ``seconds``; the other numbers are of the whole trial
        "accuracy": accuracy,
        "evaluations": [
            {key: record.get(key) for key in (*EVALUATION_KEYS, *(["loss"] if "loss" in record else []))}
            for record in totals.evals.values()
        ],
        "seconds": {"total": ended - started, **seconds},
        "step_seconds": {part: found.value for part, found in totals.seconds.items()},
        "tokens": {
            "trained_answer_tokens": int(totals.answer_tokens),
            "end_to_end_per_s": tokens_now / training_seconds if training_seconds and tokens_now else None,
            "train_per_s": totals.tokens_per_s.value,
        },
        "staleness": {
            "mean": totals.staleness.value,
            "max": totals.most_stale,
            "max_staleness": config.asynchronous.max_staleness,
            "histogram": {str(versions): totals.by_staleness[versions] for versions in sorted(totals.by_staleness)},
            "dropped": int(totals.dropped_stale),
            "filtered": int(totals.dropped_filtered),
            "tokens_too_old": totals.too_old.value,
        },
        "without_signal": totals.without_signal,  # steps
        "verdict_failures": dict(totals.verdict_failures.most_common()),
        "signal_warning": signal_warning(list(totals.last), config.train.ppo.advantage.mean, accuracy["before"]),
        "recoveries": totals.recoveries,
        "given_up": outcome.given_up,
        "restarts": [{"process": d.name, "how": d.how, "error": d.error, "time": d.time} for d in outcome.restarted],
        "killed_at_stop": outcome.killed,
        "model": str(paths.final_model) if paths.final_model.is_dir() else None,
        "folder": str(paths.root),
    }


def ended_by(config: Config, totals: Totals) -> str | None:
    """Return the limit that ended the run; None if the step log does not have it."""
    last = totals.last[-1] if totals.last else {}
    step, total, train = number(last, "step"), number(last, "total"), config.train
    if step is None or total is None:
        return None
    if step < total and totals.used_up:
        return f"train.total_epochs={train.total_epochs}, after step {step:.0f} of {total:.0f}: {totals.used_up}"
    if step < total:
        return f"train.max_seconds={train.max_seconds:g}, before step {total:.0f}"
    if total < train.total_steps:
        return f"train.total_epochs={train.total_epochs}: the data gives {total:.0f} batches of {train.batch_groups}"
    return f"train.total_steps={train.total_steps}"


def write_summary(summary: Summary, paths: TrialPaths) -> None:
    """Write summary.json."""
    staged = paths.summary.with_suffix(".tmp")
    staged.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    staged.replace(paths.summary)


def print_summary(console: Console, summary: Summary) -> None:
    """Print the summary, a line per fact. A terminal gets long ones in several lines; no word or path is divided."""
    console.print(
        f"[bold]{summary['experiment']}/{summary['trial']}: {summary['status']}[/]", highlight=False, soft_wrap=True
    )
    for name, text in _facts(summary):
        line = f"{name:<{_NAME}}  {text}"
        if console.is_terminal:
            indent = " " * (_NAME + 2)
            line = textwrap.fill(
                line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _accuracy(totals: Totals) -> dict[str, Any]:
    before, after = (number(totals.evals.get(when, {}), "accuracy") for when in ("before", "after"))
    ends = averaged_ends(totals.unbiased or totals.steps)
    return {
        "before": before,
        "after": after,
        "gain": None if before is None or after is None else after - before,
        "problems": number(totals.evals.get("after", totals.evals.get("before", {})), "problems"),
        "train_first": mean((totals.first_unbiased or totals.first)[:ends], "accuracy"),
        "train_last": mean(list(totals.last_unbiased or totals.last)[-ends:], "accuracy"),
        "train_averaged": 0 if totals.unbiased == 1 else ends,  # steps at either end; 0: one step has no two ends
    }


def _staleness(staleness: Mapping[str, Any]) -> str:
    bound = staleness.get("max_staleness", staleness.get("eta"))  # its name in older summaries
    stale = (
        f"mean {fmt(staleness['mean'], '.2f')}, max {fmt(staleness['max'], '.0f')}, bound {bound} when a group starts"
    )
    wasted = f", {percent(share)} of the sampled tokens" if (share := staleness.get("tokens_too_old")) else ""
    filtered = f", {staleness['filtered']} filtered out" if staleness["filtered"] else ""
    return f"{stale}; {staleness['dropped']} groups dropped as too old{wasted}{filtered}"


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every number that was measured; a name occurs once."""
    accuracy, seconds, staleness = summary["accuracy"], summary["seconds"], summary["staleness"]
    evaluations = {record.get("eval_id"): record for record in summary["evaluations"]}
    if failure := summary.get("failure"):  # older summaries have none
        yield "first failure", f"{failure['process']}: {failure['problem']}"
    if limit := summary.get("ended_by"):  # older summaries have none
        yield "ended by", limit
    for record in summary["evaluations"]:
        if record.get("eval_id") == "after" and accuracy["after"] is not None:
            yield "held-out accuracy", _gain(accuracy["before"], accuracy["after"], record)
        elif record.get("eval_id") == id_of_set("after", DEMOS):
            yield "held-out rows", _course(evaluations.get(id_of_set("before", DEMOS), {}), record)
        elif str(record.get("eval_id")).partition(".")[0] == "after" and record.get("complete") is not None:
            yield f"evaluation {record['eval_id']}", headline(record)
    if metrics := _metrics([record for record in summary["evaluations"] if is_held_out(record)]):
        yield "held-out metrics", metrics
    if summary["steps"]:
        course = f"{fmt(accuracy['train_first'], '.1%')} -> {fmt(accuracy['train_last'], '.1%')}"
        ends = accuracy.get("train_averaged", averaged_ends(summary["steps"]))  # older summaries have no number
        averaged = f" (means of {ends} steps)" if ends > 1 else ""
        if ends and accuracy["train_last"] is not None:
            yield "accuracy in training", f"{course} in {summary['steps']} steps{averaged}"
    phases = ", ".join(f"{name} {_clock(value)}" for name, value in seconds.items() if name != "total" and value >= 1)
    now = summary.get("steps_since_start", summary["steps"])  # older summaries have none
    scope = f" since the last start, with {now} of the {summary['steps']} steps" if now < summary["steps"] else ""
    yield "wall time", f"{_clock(seconds['total'])}{scope}" + (f"  ({phases})" if phases else "")
    if summary["steps"]:
        tokens = summary["tokens"]
        known = time_parts(summary["step_seconds"])
        hundredths = apportioned(known, round(100 * sum(known.values())))
        parts = [f"{part} {value / 100:.2f}" for part, value in hundredths.items()]
        yield "step time", f"{sum(hundredths.values()) / 100:.2f} s = " + " + ".join(parts) if parts else "-"
        yield (
            "tokens/s",
            f"{fmt(tokens['end_to_end_per_s'], ',.0f')} end to end, {fmt(tokens['train_per_s'], ',.0f')} in training",
        )
        if staleness["mean"] is not None:
            yield "staleness", _staleness(staleness)
    if idle := summary.get("without_signal"):
        cause = "every advantage was 0, as when all answers to a prompt get the same reward"
        yield "no signal", f"{idle} of {summary['steps']} steps: {cause}"
    if failures := failures_text(summary.get("verdict_failures")):  # older summaries have none
        yield "verdict failures", f"{failures} (docs/rewards.md)"
    if summary["given_up"]:
        yield "given up", ", ".join(summary["given_up"])
    if warning := summary.get("signal_warning"):
        yield "weak signal", warning
    for i, restart in enumerate(summary["restarts"]):
        error = f": {restart['error']}" if restart.get("error") else ""
        yield "" if i else "restarts", f"{restart['process']} {restart['how']}{error}"
    if recoveries := summary.get("recoveries"):  # older summaries have none
        yield "recoveries", f"training continued from a checkpoint {recoveries} time{'s' if recoveries > 1 else ''}"
    if model := summary.get("model"):  # older summaries have none
        yield "trained model", f"{shlex.quote(model)}  (a Hugging Face directory; model.path= accepts it)"
    yield "report", f"{summary['folder']}/summary.json, curves.png" if summary["steps"] else summary["folder"]


def _gain(before: float | None, after: float, record: Record) -> str:
    """Return the held-out accuracy before and after training. The gain is the difference of the numbers as shown."""
    points = "" if before is None else f" ({percentage(after) - percentage(before):+} points)"
    text = f"{fmt(before, '.1%')} -> {percent(after)}{margin(record)}{points} on {asked(record)}"
    return ", ".join([text, *further(record)])


def _course(before: Record, after: Record) -> str:
    """Return loss and accuracy on the held-out rows of a supervised run, before and after it."""
    fields = (("loss", ".3f"), ("accuracy", ".1%"))
    courses = [f"{name} {fmt(before.get(name), spec)} -> {fmt(after.get(name), spec)}" for name, spec in fields]
    return f"{', '.join(courses)} on {asked(after)}"


def _metrics(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the metrics of the first and of the last evaluation, as text."""
    measured = [record["metrics"] for record in evaluations if record.get("metrics")]
    if not measured:
        return ""
    first, last = measured[0], measured[-1]
    return ", ".join(
        f"{name} {fmt(first.get(name), '.3f')} -> {fmt(last[name], '.3f')}" for name in worth_showing(last, first)
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

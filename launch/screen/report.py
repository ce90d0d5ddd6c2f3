"""Reports a finished run from its step log: a summary on the terminal, summary.json and curves.png."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.sections.schema_evaluation import HELD_OUT
from realsys.evaluation.eval_records import headline
from realsys.launch.processes.failures import FirstFailure
from realsys.launch.processes.restart_policy import Outcome
from realsys.launch.screen.display import failures_text, fmt
from realsys.launch.screen.progress import TIME_PARTS, Record, mean, number
from realsys.launch.screen.totals import Totals, course, course_ends
from realsys.telemetry.signal import signal_warning
from realsys.telemetry.steps import surviving_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summary = dict[str, Any]


EVALUATION_KEYS = (
    *("eval_id", "set", "step", "complete", "incomplete", "problems", "samples", "failed"),
    *("accuracy", "interval", "pass_at", "majority", "majority_omitted", "unjudged", "left_out_k"),
    *("reward_mean", "length_mean", "metrics", "version"),
)


def summarise(
    config: Config,
    paths: TrialPaths,
    outcome: Outcome,
    *,
    started: float,
    ended: float,
    failure: FirstFailure | None = None,
) -> Summary:
    """Return the results of a run as plain values; a number that was not measured is None."""
    totals = Totals.of(surviving_steps(paths.steps), since=started)
    before = number(totals.evals.get("before", {}), "accuracy")
    after = number(totals.evals.get("after", {}), "accuracy")
    seconds = totals.phase_seconds(ended)
    ends = course_ends(totals.steps)
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
        "accuracy": {
            "before": before,
            "after": after,
            "gain": None if before is None or after is None else after - before,
            "problems": number(totals.evals.get("after", totals.evals.get("before", {})), "problems"),
            "train_first": mean((totals.first_unbiased or totals.first)[:ends], "accuracy"),
            "train_last": mean(list(totals.last_unbiased or totals.last)[-ends:], "accuracy"),
        },
        "evaluations": [{key: record.get(key) for key in EVALUATION_KEYS} for record in totals.evals.values()],
        "seconds": {"total": ended - started, **seconds},
        "step_seconds": {part: found.value for part, found in totals.seconds.items()},
        "tokens": {
            "trained_answer_tokens": int(totals.answer_tokens),
            "end_to_end_per_s": tokens_now / training_seconds if training_seconds and tokens_now else None,
            "train_per_s": totals.tokens_per_s.value,
        },
        "staleness": {
            "mean": totals.lag.value,
            "max": totals.longest_lag,
            "eta": config.asynchronous.max_head_offpolicyness,
            "histogram": {str(lag): totals.lags[lag] for lag in sorted(totals.lags)},
            "dropped": int(totals.dropped_stale),
            "filtered": int(totals.dropped_filtered),
            "tokens_too_old": totals.too_old.value,
        },
        "without_signal": totals.without_signal,  # steps
        "verdict_failures": dict(totals.verdict_failures.most_common()),
        "signal_warning": signal_warning(list(totals.last), config.train.ppo.advantage.mean, before),
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
    """Print the summary, a line per fact. Lines are never cut or wrapped, so that paths can be copied."""
    console.print(
        f"[bold]{summary['experiment']}/{summary['trial']}: {summary['status']}[/]", highlight=False, soft_wrap=True
    )
    for name, text in _facts(summary):
        console.print(f"{name:<20}  {text}", highlight=False, soft_wrap=True, markup=False)


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every number that was measured; a name occurs once."""
    accuracy, seconds, staleness = summary["accuracy"], summary["seconds"], summary["staleness"]
    if failure := summary.get("failure"):  # older summaries have none
        yield "first failure", f"{failure['process']}: {failure['problem']}"
    if limit := summary.get("ended_by"):  # older summaries have none
        yield "ended by", limit
    if accuracy["after"] is not None:
        text = f"{fmt(accuracy['before'], '.1%')} -> {fmt(accuracy['after'], '.1%')}"
        gain = accuracy["gain"]
        points = "" if gain is None else f"  ({gain * 100:+.1f} points)"
        yield "held-out accuracy", f"{text}{points} on {fmt(accuracy['problems'], '.0f')} problems"
    for record in summary["evaluations"]:
        if str(record.get("eval_id")).partition(".")[0] == "after" and record.get("complete") is not None:
            yield f"evaluation {record['eval_id']}", headline(record)
    if metrics := _metrics(_of_held_out(summary["evaluations"])):
        yield "held-out metrics", metrics
    if summary["steps"]:
        course = f"{fmt(accuracy['train_first'], '.1%')} -> {fmt(accuracy['train_last'], '.1%')}"
        ends = course_ends(summary["steps"])
        averaged = f" (means of {ends} steps)" if ends > 1 else ""
        yield "accuracy in training", f"{course} in {summary['steps']} steps{averaged}"
    phases = ", ".join(f"{name} {_clock(value)}" for name, value in seconds.items() if name != "total" and value >= 1)
    yield "wall time", f"{_clock(seconds['total'])}  ({phases})" if phases else _clock(seconds["total"])
    if summary["steps"]:
        tokens = summary["tokens"]
        yield "step time", _split(summary["step_seconds"])
        yield (
            "tokens/s",
            f"{fmt(tokens['end_to_end_per_s'], ',.0f')} end to end, {fmt(tokens['train_per_s'], ',.0f')} in training",
        )
        lag = f"mean {fmt(staleness['mean'], '.2f')}, max {fmt(staleness['max'], '.0f')}, bound {staleness['eta']}"
        filtered = f", {staleness['filtered']} filtered out" if staleness["filtered"] else ""
        wasted = f", {share:.1%} of the sampled tokens" if (share := staleness.get("tokens_too_old")) else ""
        yield "staleness", f"{lag}; {staleness['dropped']} groups dropped{wasted}{filtered}"
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


def _of_held_out(evaluations: Sequence[Record]) -> list[Record]:
    """Return the evaluations of the held-out problems, without those of other data sets."""
    return [record for record in evaluations if record.get("set") in (None, HELD_OUT)]


def _metrics(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return the metrics of the first and of the last evaluation, as text."""
    measured = [record["metrics"] for record in evaluations if record.get("metrics")]
    if not measured:
        return ""
    first, last = measured[0], measured[-1]
    return ", ".join(f"{name} {fmt(first.get(name), '.3f')} -> {fmt(last[name], '.3f')}" for name in sorted(last))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _split(seconds: Mapping[str, float | None]) -> str:
    parts = [f"{part} {value:.2f}" for part in TIME_PARTS if (value := seconds.get(part)) is not None]
    return f"{fmt(seconds.get('total'), '.2f')} s = " + " + ".join(parts) if parts else "-"


# ---- curves

_LINE, _POINT, _BAND = "#1f5fa8", "#c8452e", "#9dc3e6"


Point = Mapping[str, float]


def draw_curves(summary: Summary, paths: TrialPaths) -> None:
    """Draw reward, accuracy (held-out as points), staleness and completion length over train steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    train = list(course(surviving_steps(paths.steps), summary["steps"]))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    reward, accuracy, lag, length = axes.flat
    _line(reward, train, "Mean reward", "reward_mean")
    _line(accuracy, train, "Accuracy", "accuracy", label="training batch")
    _held_out(accuracy, _of_held_out(summary["evaluations"]))
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _staleness(lag, train, int(summary["staleness"]["eta"]))
    _line(length, train, "Answer length (tokens)", "length_mean", label="all")
    _line(length, train, "Answer length (tokens)", "length_correct", label="correct", color="#3a8f4d", style="--")
    _line(length, train, "Answer length (tokens)", "length_wrong", label="wrong", color=_POINT, style=":")
    for axis in axes.flat:
        axis.grid(True, color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False, fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("Train step")
    figure.suptitle(f"{summary['experiment']}/{summary['trial']}   {summary['allocation']}", fontsize=12)
    figure.savefig(paths.curves, dpi=130)
    pyplot.close(figure)


def _series(points: Sequence[Point], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if name in point]
    return [point["step"] for point in known], [point[name] for point in known]


def _line(
    axis: Axes,
    points: Sequence[Point],
    title: str,
    name: str,
    *,
    label: str | None = None,
    color: str = _LINE,
    style: str = "-",
) -> None:
    steps, values = _series([point for point in points if "length_biased" not in point], name)
    if values:
        marker = "o" if len(values) < 3 else None  # a single step has no line to see
        axis.plot(steps, values, color=color, linestyle=style, linewidth=1.8, label=label, marker=marker, markersize=4)
    steps, values = _series([point for point in points if "length_biased" in point], name)
    if values:  # the first batches and the last one: shown, but not as a part of the course
        axis.plot(steps, values, "o", color=color, fillstyle="none", alpha=0.4, markersize=4)
    axis.set_title(title, loc="left", fontsize=11)


def _held_out(axis: Axes, evaluations: Sequence[Record]) -> None:
    found = [(number(record, "step"), number(record, "accuracy")) for record in evaluations]
    known = [(step, value) for step, value in found if step is not None and value is not None]
    if known:
        steps, values = zip(*known, strict=True)
        axis.plot(steps, values, "D", color=_POINT, markersize=7, label="held out", zorder=3)
        for step, value in known:
            axis.annotate(
                f"{value:.1%}", (step, value), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9
            )
    axis.margins(x=0.06, y=0.15)


def _staleness(axis: Axes, train: Sequence[Point], eta: int) -> None:
    steps, highest = _series(train, "lag_max")
    _, lowest = _series(train, "lag_min")
    if steps and len(lowest) == len(highest):
        axis.fill_between(steps, lowest, highest, color=_BAND, alpha=0.5, linewidth=0, label="min to max")
    _line(axis, train, "Staleness (versions)", "lag_mean", label="mean")
    axis.axhline(eta, color=_POINT, linewidth=1.2, linestyle="--", label=f"bound (eta = {eta})")
    axis.set_ylim(bottom=0)

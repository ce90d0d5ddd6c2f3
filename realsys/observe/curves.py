"""curves.png: a trial over its train steps, with restarts and evaluations marked.

    python -m realsys.observe.curves TRIAL_DIR      draws it now, at the lowest priority

A panel whose numbers were not measured is left out.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realsys.cluster.children.child_process import ChildProcess
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import RealsysError
from realsys.observe.evaluation_records import is_held_out
from realsys.observe.percent import percent
from realsys.observe.screen.progress import OTHER, TIME_PARTS, Record, number
from realsys.observe.step_log import RECOVERED, StepTail, read_events, restarts_in_steps, surviving_steps
from realsys.observe.totals import Totals, curve_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, float]

_LINE, _POINT, _BAND, _GREEN, _GREY = "#1f5fa8", "#c8452e", "#9dc3e6", "#3a8f4d", "#8a8a8a"
_PARTS = {
    "wait": "#d9a441",
    "switch": "#c8452e",
    "inf": "#9dc3e6",
    "train": "#1f5fa8",
    "save": "#3a8f4d",
    "publish": "#8fc79b",
    "checkpoint": "#7d5ba6",
    OTHER: "#c9c9c9",
}
_COLUMNS, _WIDTH = 4, 19.0  # panels in a row; inches
_SMOOTHED = 30  # points from which on a line is drawn with its running mean
_WINDOW = 25  # the running mean is over a 25th of the points


@dataclass(frozen=True, slots=True)
class _Run:
    """Content of the panels. ``restarts``: places on the axis of steps; ``evaluations``: of held-out problems."""

    points: Sequence[Point]
    evaluations: Sequence[Record]
    restarts: Sequence[float]
    max_staleness: int


@dataclass(frozen=True, slots=True)
class _Panel:
    """One panel. It is drawn if a point has one of the fields ``needs``."""

    title: str
    draw: Callable[[Axes, _Run], None]
    needs: Sequence[str]


def draw_curves(config: Config, paths: TrialPaths) -> None:
    """Draw the curves of a trial, running or ended, and replace ``curves.png``. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    run = _read(config, paths)
    panels = [panel for panel in _panels(run) if any(name in point for point in run.points for name in panel.needs)]
    rows = max(1, -(-len(panels) // _COLUMNS))
    height = 0.9 + 3.0 * rows
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(_WIDTH, height), sharex=True, squeeze=False)
    # Fixed margins in inches: a layout that fits the labels draws all texts once more, a third of the time.
    figure.subplots_adjust(
        left=0.7 / _WIDTH, right=1 - 0.15 / _WIDTH, bottom=0.3 / height, top=1 - 0.9 / height, wspace=0.2, hspace=0.25
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel.draw(axis, run)
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelbottom=True)
        # restarts as lines, evaluations as ticks at the bottom; grid, frame and legend
        for place in run.restarts:
            axis.axvline(place, color=_GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        steps = [step for record in run.evaluations if (step := number(record, "step")) is not None]
        if steps:
            bottom = axis.get_xaxis_transform()
            axis.plot(steps, [0.0] * len(steps), "^", color=_POINT, markersize=4, transform=bottom)
        axis.grid(True, color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=True, framealpha=0.75, edgecolor="none", fontsize=8, ncols=2)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(
        f"{config.experiment}/{config.trial}   {config.allocation}\n"
        "over train steps; dotted: restart, triangle: evaluation, hollow: batch of unusual lengths",
        fontsize=11,
    )
    staged = paths.curves.with_name(f"{paths.curves.stem}.{os.getpid()}.tmp")
    figure.savefig(staged, dpi=110, format="png")
    pyplot.close(figure)
    staged.replace(paths.curves)


def _read(config: Config, paths: TrialPaths) -> _Run:
    totals = Totals.of(surviving_steps(paths.steps))
    evaluations = [record for record in totals.evals.values() if is_held_out(record)]
    records = list(_times(surviving_steps(paths.steps)))
    restarts = {place for place, _ in restarts_in_steps(read_events(paths.events), records)}
    restarts |= {max(0, int(record["step"])) + 0.5 for record in records if record["kind"] == RECOVERED}
    points = list(curve_points(surviving_steps(paths.steps), totals.steps))
    return _Run(points, evaluations, sorted(restarts), config.asynchronous.max_staleness)


def _times(records: Iterator[Record]) -> Iterator[dict[str, Any]]:
    """Yield the fields of steps and recoveries that the marks need: a long log does not fit in memory."""
    for record in records:
        if record["kind"] in ("train", RECOVERED) and isinstance(record.get("step"), int):
            yield {name: record[name] for name in ("kind", "step", "time") if name in record}


# ---- panels


def _panels(run: _Run) -> Iterator[_Panel]:
    """Yield the panels in their order. A reward of 0 and 1 is the accuracy: one panel shows it."""
    if any(point.get("reward_mean") != point.get("accuracy") for point in run.points):
        yield _Panel("Mean reward", lambda axis, run: _line(axis, run, "reward_mean"), ["reward_mean"])
    yield _Panel("Accuracy", _accuracy, ["accuracy"])
    yield _Panel("Completion length (tokens)", _lengths, ["length_mean"])
    yield _Panel("Staleness (versions)", _staleness, ["stale_mean"])
    yield _Panel("Behaviour weight w", _weights, ["w_mean"])
    yield _Panel("Entropy (nats)", lambda axis, run: _line(axis, run, "entropy"), ["entropy"])
    yield _Panel("KL (nats)", _kl, ["kl_behav", "kl_ref"])
    yield _Panel("Loss", lambda axis, run: _line(axis, run, "loss"), ["loss"])
    yield _Panel("Gradient norm", lambda axis, run: _line(axis, run, "grad_norm"), ["grad_norm"])
    yield _Panel("Share of tokens or episodes", _shares, ["clip_fraction", "truncated", "untrained"])
    yield _Panel("Time of a step (s)", _time, [f"seconds/{OTHER}"])
    yield _Panel("Tokens per second", _speed, ["consumed_tokens_per_s"])


def _accuracy(axis: Axes, run: _Run) -> None:
    from matplotlib.ticker import PercentFormatter

    _line(axis, run, "accuracy", label="training batch")
    found = [(number(record, "step"), number(record, "accuracy")) for record in run.evaluations]
    known = [(step, value) for step, value in found if step is not None and value is not None]
    if known:
        steps, values = zip(*known, strict=True)
        line = 0.8 if len(known) > 2 else 0.0  # two points would look like a curve
        axis.plot(steps, values, "D-", color=_POINT, linewidth=line, markersize=5, label="held out", zorder=3)
        for (step, value), side in {known[-1]: "right", known[0]: "left"}.items():  # inside of the panel
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
            axis.annotate(
                percent(value),
                (step, value),
                xytext=(0, -15),
                textcoords="offset points",
                ha=side,
                fontsize=9,
                bbox=box,
            )
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.margins(x=0.06, y=0.15)


def _lengths(axis: Axes, run: _Run) -> None:
    _line(axis, run, "length_mean", label="all")
    _line(axis, run, "length_correct", label="correct", color=_GREEN, style="--")
    _line(axis, run, "length_wrong", label="wrong", color=_POINT, style=":")


def _staleness(axis: Axes, run: _Run) -> None:
    steps, highest = _series(run.points, "stale_max")
    _, lowest = _series(run.points, "stale_min")
    if steps and len(lowest) == len(highest):
        axis.fill_between(steps, lowest, highest, color=_BAND, alpha=0.5, linewidth=0, label="min to max")
    _line(axis, run, "stale_mean", label="mean")
    bound = run.max_staleness
    axis.axhline(bound, color=_POINT, linewidth=1.2, linestyle="--", label=f"bound when a group starts ({bound})")
    axis.set_ylim(bottom=0, top=max([bound, *highest]) * 1.35 + 0.1)  # room for the legend above the data


def _weights(axis: Axes, run: _Run) -> None:
    _line(axis, run, "w_mean", label="mean")
    _line(axis, run, "w_max", label="largest", color=_POINT, style=":")
    _line(axis, run, "w_ess", label="effective sample size", color=_GREEN, style="--")
    if axis.dataLim.y1 <= 0:
        return  # no step trained a token; a logarithmic axis cannot show 0
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    low, high = axis.get_ylim()
    axis.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")  # the labels of several decades would overlap


def _kl(axis: Axes, run: _Run) -> None:
    _line(axis, run, "kl_behav", label="sampled to current (staleness)")
    _line(axis, run, "kl_step", label="moved by the step", color=_GREEN, style="--")
    _line(axis, run, "kl_ref", label="to the reference", color=_POINT, style=":")


def _shares(axis: Axes, run: _Run) -> None:
    from matplotlib.ticker import PercentFormatter

    _line(axis, run, "clip_fraction", label="clipped")
    _line(axis, run, "truncated", label="cut off", color=_POINT, style=":")
    _line(axis, run, "untrained", label="sampled, not trained", color=_GREEN, style="--")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_ylim(bottom=0)


def _time(axis: Axes, run: _Run) -> None:
    """Draw the parts of a step's time on top of each other: their sum is the step."""
    points = [point for point in run.points if f"seconds/{OTHER}" in point]
    names = [part for part in (*TIME_PARTS, OTHER) if any(f"seconds/{part}" in point for point in points)]
    steps = [point["step"] for point in points]
    parts = [[point.get(f"seconds/{name}", 0.0) for point in points] for name in names]
    axis.stackplot(steps, *parts, labels=names, colors=[_PARTS[name] for name in names], linewidth=0)
    axis.margins(x=0)
    axis.set_ylim(top=max(map(sum, zip(*parts, strict=True))) * 1.5)  # room for the legend above the data


def _speed(axis: Axes, run: _Run) -> None:
    _line(axis, run, "consumed_tokens_per_s", label="completion tokens, whole step")
    _line(axis, run, "train_tokens_per_s", label="all tokens, while it computes", color=_GREY, style="--")
    axis.set_ylim(bottom=0)


# ---- parts of a panel


def _series(points: Sequence[Point], name: str) -> tuple[list[float], list[float]]:
    known = [point for point in points if name in point]
    return [point["step"] for point in known], [point[name] for point in known]


def _line(axis: Axes, run: _Run, name: str, *, label: str | None = None, color: str = _LINE, style: str = "-") -> None:
    """Draw one field. A long curve is drawn thin, with its running mean.

    Biased steps, the first ones of each start and the last one, are hollow points and no part of the line.
    """
    steps, values = _series(run.points, name)
    biased = ["length_biased" in point for point in run.points if name in point]
    usual = _where([not each for each in biased], values)
    if biased.count(False) >= _SMOOTHED:
        axis.plot(steps, usual, color=color, linestyle=style, linewidth=0.7, alpha=0.4)
        # a running mean, NaN where the value is NaN
        half = max(3, biased.count(False) // _WINDOW) // 2
        parts = ([v for v in usual[max(0, i - half) : i + half + 1] if not math.isnan(v)] for i in range(len(usual)))
        usual = [
            math.nan if math.isnan(value) else sum(part) / len(part) for value, part in zip(usual, parts, strict=True)
        ]
    if not all(biased):
        axis.plot(steps, usual, color=color, linestyle=style, linewidth=1.8, label=label)
        alone = [not each and _near(biased, i).count(False) == 1 for i, each in enumerate(biased)]
        if any(alone):  # a single step has no line to see
            axis.plot(steps, _where(alone, values), "o", color=color, markersize=4)
    if any(biased):
        joined = _where([any(_near(biased, i)) for i in range(len(biased))], values)
        axis.plot(steps, joined, color=color, linestyle="--", linewidth=0.7, alpha=0.4)
        shown = label if all(biased) else None
        axis.plot(
            steps, _where(biased, values), "o", color=color, fillstyle="none", alpha=0.4, markersize=4, label=shown
        )


def _where(kept: Sequence[bool], values: Sequence[float]) -> list[float]:
    """Return the values with NaN, which is not drawn, in place of those that are not kept."""
    return [value if keep else math.nan for keep, value in zip(kept, values, strict=True)]


def _near(flags: Sequence[bool], place: int) -> Sequence[bool]:
    """Return a flag with its neighbours."""
    return flags[max(0, place - 1) : place + 2]


def main(argv: Sequence[str]) -> int:
    """Draw the curves of a trial, and return the exit code. The process takes only time that no other process wants."""
    if len(argv) != 1:
        print("usage: python -m realsys.observe.curves TRIAL_DIR", file=sys.stderr)
        return 2
    os.nice(19)
    paths = TrialPaths(Path(argv[0]).resolve())
    try:
        draw_curves(read_config(paths.config), paths)
    except (RealsysError, OSError) as error:
        print(f"realsys: {error}", file=sys.stderr)
        return 2
    return 0


# ---- draws curves.png while a run lasts, in a process at the lowest priority
#
#     wait every_s ──> draw, if the step log has grown ──> wait at least 200 times as long as that took ──> ...
#
# So the drawing takes at most 0.5 % of one core, however long the log is. Nothing here ends or delays a run.


_PAUSE = 200.0  # times the duration of a drawing
_LONGEST_S = 120.0  # bound on one drawing
MODULE = "realsys.observe.curves"


async def draw_while_running(paths: TrialPaths, every_s: float) -> None:
    """Draw about every ``every_s`` seconds until cancelled; never, if that is 0."""
    if not every_s:
        return
    pause_s, drawn = every_s, 0
    while True:
        await asyncio.sleep(pause_s)
        size = _size(paths.steps)
        if size == drawn or not any(record["kind"] == "train" for record in StepTail(paths.steps).records()):
            continue
        began = time.monotonic()
        await _draw(paths)
        drawn, pause_s = size, max(every_s, _PAUSE * (time.monotonic() - began))


async def _draw(paths: TrialPaths) -> None:
    """Run the process. A drawing that fails is left out: the one at the end of the run reports its error."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        child = ChildProcess([sys.executable, "-P", "-m", MODULE, str(paths.root)], env, subprocess.DEVNULL)
    except OSError:
        return
    try:
        await child.exits_within(_LONGEST_S)
    finally:
        child.kill()
        await asyncio.shield(child.end(None))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

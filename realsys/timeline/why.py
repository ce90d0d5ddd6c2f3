"""Report on who waits for whom in a trial, and on what would help.

    step log ──> times of the steps ──────────────────────┐
    spans ─────> what the last group of each batch did ───┼──> Report: shares that add up to 100 %, use, advice
            └──> use of servers and RolloutWorkers ───────┘

A trial without spans has no parts of the wait, and no use of its processes. The step log alone has the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError
from realsys.observe.percent import apportioned
from realsys.observe.step_log import surviving_steps
from realsys.timeline.advice import Facts, advice
from realsys.timeline.follow import ways_of
from realsys.timeline.read import Span, Window, bounded_window, read_timeline
from realsys.timeline.step_times import StepTime, last_steps, step_times, sum_of
from realsys.timeline.units import number_of
from realsys.timeline.usage import ServerUse, WorkerUse, life_of_groups, server_use, worker_use
from realsys.timeline.waits import parts_of_wait

#: train steps that ``bottleneck`` sums up
LAST = 20
#: percentage of the time that a trainer waits if generation is slower; less than that is the jitter of arrivals
SLOWER = 10
#: (last steps whose spans are read, seconds before the first of them, in which a group of its batch may have begun):
#: the first one whose spans are not too many, because a large run has thousands of spans per second
_READ = ((50, 3600.0), (20, 900.0), (5, 120.0), (1, 0.0))


@dataclass(frozen=True, slots=True)
class Report:
    """Times of train steps, their causes, and advice.

    steps     times of each step, and the parts of its wait in seconds; none without spans
    time      their sum
    waits     parts of the whole wait in seconds, from the steps with spans and scaled to all; empty without spans
    covered   steps whose spans were read: at most the last 50, fewer of a large run
    life      mean seconds of a group by part
    """

    steps: Sequence[tuple[StepTime, Mapping[str, float]]]
    time: StepTime
    waits: Mapping[str, float] = field(default_factory=dict)
    covered: int = 0
    servers: ServerUse = field(default_factory=ServerUse)
    workers: WorkerUse = field(default_factory=WorkerUse)
    life: Mapping[str, float] = field(default_factory=dict)
    advice: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        return sentence(self.time)

    @property
    def wait_percents(self) -> Mapping[str, int]:
        """Return the parts of the wait as percentages of the whole time. They add up to that of the wait."""
        return dict.fromkeys(self.waits, 0) | apportioned(self.waits, self.time.percents["wait"])


def bottleneck(paths: TrialPaths) -> str:
    """Return one sentence about the last train steps: "generation-bound: the trainer waits 47 % of ...".

    "" before the first step. It reads the end of the step log only, so it may be called every few seconds.
    """
    times = last_steps(paths.steps, LAST)
    return sentence(sum_of(times)) if times else ""


def sentence(time: StepTime) -> str:
    """Return which side limits the run, with the share that shows it.

    Batches wait in the trainer's buffer while generation is faster. So a trainer that waits shows that it is slower.
    """
    percents = time.percents
    wait, trained = percents["wait"], percents["inference"] + percents["train"]
    others = {
        "publication-bound": (percents["copy"] + percents["publish"], "copying and publishing weights takes"),
        "checkpoint-bound": (percents["checkpoint"], "checkpoints take"),
        "evaluation-bound": (percents["between"], "what lies between two steps, mostly evaluations, takes"),
    }
    name, (most, what) = max(others.items(), key=lambda item: item[1][0])
    if most > max(wait, trained):
        return f"{name}: {what} {most} % of the time"
    if wait >= SLOWER:
        return f"generation-bound: the trainer waits {wait} % of the time for batches, and computes {trained} %"
    return f"training-bound: calls take {trained} % of the time, and the trainer waits {wait} %"


def explain(paths: TrialPaths, first: int | None = None, last: int | None = None) -> Report:
    """Return the report of the train steps ``first`` to ``last``, by default of all. Raises ConfigError without any."""
    times = step_times(surviving_steps(paths.steps))
    chosen = [t for t in times if (first is None or t.step >= first) and (last is None or t.step <= last)]
    if not chosen:
        there = f"the step log has steps {times[0].step} to {times[-1].step}" if times else "no train step has ended"
        raise ConfigError("TRIAL_DIR", str(paths.root), f"{there}: nothing to explain")
    return _with_spans(paths, chosen, sum_of(chosen))


def _with_spans(paths: TrialPaths, times: Sequence[StepTime], total: StepTime) -> Report:
    read, since = _to_read(paths, times)
    window = read[0].end - read[0].seconds, read[-1].end
    spans = read_timeline(paths.spans, (since, window[1])).spans
    ways = ways_of(spans)
    found = _steps_of(spans, {time.step for time in read})
    steps, pairs = [], []
    for time in times:
        pair = found.get(time.step)
        parts = parts_of_wait(pair[1], pair[0], ways) if pair is not None else {}
        steps.append((time, scaled(parts, time.parts["wait"])))
        pairs += [pair] if pair is not None else []
    report = Report(steps, total)
    if pairs:
        seen: Window = max(window[0], pairs[0][0].begin), window[1]
        waits: dict[str, float] = {}
        for _, parts in steps:
            for name, seconds in parts.items():
                waits[name] = waits.get(name, 0.0) + seconds
        report = replace(
            report,
            waits=scaled(waits, total.parts["wait"]),
            covered=len(pairs),
            servers=server_use(spans, seen),
            workers=worker_use(spans, seen),
            life=life_of_groups(pairs, ways, since),
        )
    facts = Facts(total, report.wait_percents, report.servers, report.workers, _config(paths))
    return replace(report, advice=advice(facts))


def _to_read(paths: TrialPaths, times: Sequence[StepTime]) -> tuple[Sequence[StepTime], float]:
    """Return the steps whose spans are read, and the time from which on spans are read."""
    firsts = [(times[-count:][0], before_s) for count, before_s in _READ]
    windows = [(first.end - first.seconds - before_s, times[-1].end) for first, before_s in firsts]
    chosen = windows.index(bounded_window(paths.spans, windows))
    return times[-_READ[chosen][0] :], windows[chosen][0]


def scaled(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return ``parts`` scaled so that they add up to ``whole``: the step log and the spans have two stop watches."""
    total = sum(parts.values())
    return {name: seconds * whole / total for name, seconds in parts.items()} if total > 0 else {}


def _steps_of(spans: Sequence[Span], numbers: set[int]) -> dict[int, tuple[Span, Span]]:
    """Return step -> its span and that of its wait. A step that was trained twice counts with its last time."""
    steps: dict[int, Span] = {}
    waits: dict[int, Span] = {}
    for span in spans:
        number = number_of(span.unit, "step") if span.process.startswith("master_worker/") else None
        if number is None or number not in numbers:
            continue
        if span.name == "wait":
            waits[number] = span
        if span.name == "step" and "tickets" in span.facts:
            steps[number] = span
    return {number: (step, waits[number]) for number, step in steps.items() if number in waits}


def _config(paths: TrialPaths) -> Config | None:
    with contextlib.suppress(RealsysError, OSError):
        return read_config(paths.config)
    return None

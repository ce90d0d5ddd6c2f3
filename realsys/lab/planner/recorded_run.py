"""Times of the servers of a recorded run, from their spans.

decode spans  ──> seconds and tokens of each, and how many completions decoded beside it
pause spans   ──> the prefill spans that begin there: caches that are computed again, and for how long
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.manager.ledger.events import Finished, Granted
from realsys.manager.ledger.journal import read_journal
from realsys.observe.step_log import read_steps
from realsys.observe.timeline.clocked_spans import (
    TimelineSpan,
    Window,
    attempt_of,
    bounded_window,
    read_timeline,
    ticket_of,
)
from realsys.train.record_files import read_record, recorded_steps

_KIND = "generation_server"
_STEPS = (50, 20, 5, 1)  # last steps whose spans are read: the first number whose spans are not too many
_MOST = 20_000  # decode spans that are kept, evenly spaced: more tell no more
_FEWEST = 100  # decode spans; the seconds of a token are estimated from at least this many
_SAME_MOMENT = 0.02  # s; a cache is invalid from a pause on


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens of one completion that one weight version sampled. Times are in unix seconds.

    running      mean number of completions of the server that decoded meanwhile, this one included
    recomputing  seconds of it in which the server computed caches again
    """

    begin: float
    end: float
    tokens: int
    running: float
    recomputing: float


@dataclass(frozen=True, slots=True)
class Recompute:
    """Caches of one server that are computed again after an update: ``tokens`` of all running completions."""

    begin: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """What the spans of the servers tell; empty without spans. ``served``: attempt -> when servers had its group."""

    decoding: Sequence[Decoding] = ()
    recomputes: Sequence[Recompute] = ()
    served: Mapping[tuple[str, int], Window] = field(default_factory=dict)

    @property
    def tell_tokens(self) -> bool:
        """Return True if the decode spans are enough to tell what a token takes."""
        return len(self.decoding) >= _FEWEST


def read_server_times(paths: TrialPaths, begins: Sequence[float], end: float) -> ServerTimes:
    """Return the times of the servers during the last steps. ``begins``: of all steps; ``end``: of the last one."""
    windows = [(begins[-min(count, len(begins))], end) for count in _STEPS]
    window = bounded_window(paths.spans, windows, _KIND)
    return server_times(read_timeline(paths.spans, window, _KIND).spans, window)


def server_times(spans: Sequence[TimelineSpan], window: Window) -> ServerTimes:
    """Return the times of the servers from their ``spans``, sorted by begin; decode spans inside ``window`` only."""
    decoding: list[Decoding] = []
    recomputes: list[Recompute] = []
    for server in sorted({span.process for span in spans}):
        own = [span for span in spans if span.process == server]
        again = _recomputes(own)
        recomputes += again
        decoding += _decoding([span for span in own if span.name == "decode"], again, window)
    decoding.sort(key=lambda each: each.begin)
    return ServerTimes(decoding[:: 1 + len(decoding) // _MOST], recomputes, _served(spans, window))


def _served(spans: Sequence[TimelineSpan], window: Window) -> dict[tuple[str, int], Window]:
    """Return from when to when the servers had the completions of each attempt that began in ``window``."""
    found: dict[tuple[str, int], Window] = {}
    for span in spans:
        if attempt := attempt_of(span.unit):
            key = ticket_of(attempt), int(attempt.rpartition(".")[2])
            begin, end = found.get(key, (span.begin, span.end))
            found[key] = min(begin, span.begin), max(end, span.end)
    return {key: times for key, times in found.items() if times[0] >= window[0] and times[1] <= window[1]}


def _recomputes(spans: Sequence[TimelineSpan]) -> list[Recompute]:
    """Return the caches that one server computed again. A prefill that begins at a pause is one of these."""
    pauses = [span for span in spans if span.name == "pause"]
    found: list[list[TimelineSpan]] = [[] for _ in pauses]
    begins = np.array([span.begin for span in pauses])
    for span in spans:
        if span.name == "prefill" and "positions" in span.facts and len(pauses):
            k = int(np.searchsorted(begins, span.begin + _SAME_MOMENT)) - 1
            if k >= 0 and span.begin <= pauses[k].end + _SAME_MOMENT:
                found[k].append(span)
    return [
        Recompute(pause.end, max(span.end for span in again), sum(int(span.facts["positions"]) for span in again))
        for pause, again in zip(pauses, found, strict=True)
        if again and max(span.end for span in again) > pause.end
    ]


def _decoding(spans: Sequence[TimelineSpan], recomputes: Sequence[Recompute], window: Window) -> list[Decoding]:
    running = _integral([(span.begin, span.end) for span in spans])
    again = _integral([(each.begin, each.end) for each in recomputes])
    found = []
    for span in spans:
        tokens = int(span.facts.get("tokens", 0))
        if tokens and span.seconds > 0 and window[0] <= span.begin and span.end <= window[1]:
            mean = (_at(running, span.end) - _at(running, span.begin)) / span.seconds
            found.append(Decoding(span.begin, span.end, tokens, mean, _at(again, span.end) - _at(again, span.begin)))
    return found


def _integral(intervals: Sequence[Window]) -> tuple[Any, Any]:
    """Return (times, integral up to them) of the number of ``intervals`` that contain a moment."""
    if not intervals:
        return np.zeros(1), np.zeros(1)
    changes = np.array([(begin, 1.0) for begin, _ in intervals] + [(end, -1.0) for _, end in intervals])
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    times, counts = changes[:, 0], np.cumsum(changes[:, 1])
    return times, np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])


def _at(integral: tuple[Any, Any], time: float) -> float:
    return float(np.interp(time, *integral))


# ---- reads one run for the planner: its steps, its groups and the lengths of its completions
#
#     steps.jsonl   tokens and seconds of each step           ─┐
#     ledger.jsonl  when each group was granted and finished   ├──> Recording
#     record/       lengths of the completions                 │
#     spans/        seconds and tokens of the servers         ─┘
#
# Nothing in the folder is changed. The run may still be running.


FEWEST_STEPS = 8  # noise hides the costs of a step if there are fewer
SKIP = 2  # first steps: the pipeline fills, and kernels are warmed up
_MOST_STEPS, _MOST_GROUPS = 200, 20_000  # the last ones of the run: lengths change while it learns
_GAP = 20.0  # median steps without a step: the run was stopped, or evaluated for long


@dataclass(frozen=True, slots=True)
class StepCost:
    """One train step without its checkpoint. ``end`` is in unix seconds, the parts are in seconds."""

    step: int
    end: float
    total: float
    wait: float  # until the batch is complete
    inference: float  # model function calls without gradient
    training: float  # model function calls with gradient
    tokens: int  # tokens of all rows, prompts included
    sampled: int  # completion tokens of the batch
    trained: int  # tokens that the calls computed: rows without a gradient may be skipped

    @property
    def begin(self) -> float:
        return self.end - self.total

    @property
    def busy(self) -> float:
        """Seconds of all model function calls."""
        return self.inference + self.training

    @property
    def rest(self) -> float:
        """Seconds that are neither waiting nor model function calls."""
        return max(0.0, self.total - self.wait - self.busy)


@dataclass(frozen=True, slots=True)
class GroupTime:
    """One attempt at a ticket, from its grant to the end that its worker reported, in unix seconds."""

    ticket_id: str
    attempt: int
    granted: float
    finished: float
    lengths: tuple[int, ...]  # tokens of each completion; () if no record has them

    @property
    def seconds(self) -> float:
        return self.finished - self.granted


@dataclass(frozen=True, slots=True)
class Recording:
    """A run as the planner reads it."""

    folder: Path
    config: Config
    steps: list[StepCost]
    groups: list[GroupTime]
    prompt_tokens: float
    gpus: bool = False  # the trainer computed on GPUs
    servers: ServerTimes = field(default_factory=ServerTimes)

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """Lengths of the completions of each recorded group."""
        return [group.lengths for group in self.groups if group.lengths]


def steady(recording: Recording) -> list[StepCost]:
    """Return the steps after those that fill the pipeline, and before those of which all groups were granted.

    The last steps of a run have no generation next to them, so they are faster than its steady state.
    """
    last = max((group.granted for group in recording.groups), default=recording.steps[-1].end)
    filled = recording.config.asynchronous.max_staleness + 2  # a simulation leaves out the same steps
    found = [step for step in recording.steps[filled:] if step.end <= last]
    return found if len(found) >= FEWEST_STEPS // 2 else recording.steps[SKIP:]


def read_recording(folder: Path) -> Recording:
    """Read a trial. Raises ConfigError if it has too few steps, or no group during them."""
    paths = TrialPaths(folder)
    if not paths.config.is_file():
        raise ConfigError("--from", str(folder), f"is not the folder of a trial: {paths.config.name} not found")
    config = read_config(paths.config)
    records = [record for record in read_steps(paths.steps) if record["kind"] == "train"]
    steps = _steps(records, config.train.batch_groups)
    if len(steps) < FEWEST_STEPS:
        problem = f"has {len(steps)} train steps, and a fit needs {FEWEST_STEPS}: run it longer"
        raise ConfigError("--from", str(folder), problem)
    rows = _rows(paths.records)
    groups = _groups(paths.ledger, {ticket: tuple(lengths) for ticket, (lengths, _) in rows.items()})
    inside = [group for group in groups if steps[0].begin < group.finished and group.granted < steps[-1].end]
    if not any(group.granted >= steps[0].begin for group in inside):
        problem = f"{paths.ledger.name} has no group that began and ended during its steps: run it longer"
        raise ConfigError("--from", str(folder), problem)
    prompts = [tokens for _, tokens in rows.values()]
    mean = sum(prompts) / len(prompts) if prompts else _mean_prompt(steps, config)
    return Recording(
        folder,
        config,
        steps,
        inside,
        mean,
        gpus=any("gpu" in record for record in records),
        servers=read_server_times(paths, [step.begin for step in steps], steps[-1].end),
    )


def _steps(records: Sequence[Mapping[str, Any]], batch_groups: int) -> list[StepCost]:
    """Return the last steps without a gap between them."""
    steps = [_step(record) for record in records[-max(FEWEST_STEPS, min(_MOST_STEPS, _MOST_GROUPS // batch_groups)) :]]
    if not steps:
        return []
    longest = _GAP * median(step.total for step in steps)
    first = 0
    for k, (before, after) in enumerate(pairwise(steps), 1):
        if after.begin - before.end > longest:
            first = k
    return steps[first:]


def _step(record: Mapping[str, Any]) -> StepCost:
    seconds, stats = record["seconds"], record.get("stats", {})
    checkpoint = seconds.get("checkpoint", 0.0)  # the end of the step; a simulation writes none
    return StepCost(
        step=record["step"],
        end=record["time"] - checkpoint,
        total=seconds["total"] - checkpoint,
        wait=seconds["wait"],
        inference=seconds.get("inf", 0.0),
        training=seconds.get("train", 0.0),
        tokens=record["tokens"],
        sampled=record["answer_tokens"],
        trained=int(stats.get("tokens", record["answer_tokens"])),
    )


def _rows(root: Path) -> dict[tuple[str, int], tuple[list[int], float]]:
    """Return (ticket, attempt) -> lengths of its completions, mean tokens of its prompt."""
    found: dict[tuple[str, int], tuple[list[int], float]] = {}
    for folder in recorded_steps(root).values():
        for group in read_record(folder).groups:
            episodes: dict[int, int] = {}
            for row in group:
                episodes[row.episode] = row.episode_tokens or row.loss_tokens
            first = group[0]
            prompt = sum(row.length - row.loss_tokens for row in group) / len(group)
            found[first.ticket_id, first.attempt] = list(episodes.values()), prompt
    return found


def _groups(path: Path, lengths: Mapping[tuple[str, int], tuple[int, ...]]) -> list[GroupTime]:
    granted: dict[tuple[str, int], float] = {}
    groups = []
    for event, _ in read_journal(path):
        if isinstance(event, Granted):
            granted[event.ticket_id, event.attempt] = event.time
        elif isinstance(event, Finished) and event.outcome in ("accepted", "filtered"):
            key = event.ticket_id, event.attempt
            if key in granted:
                groups.append(GroupTime(*key, granted.pop(key), event.time, lengths.get(key, ())))
    return groups


def _mean_prompt(steps: list[StepCost], config: Config) -> float:
    rows = config.train.batch_groups * config.rollout.group_size
    return sum(step.tokens - step.sampled for step in steps) / len(steps) / rows

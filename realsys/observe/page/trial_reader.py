"""Reader of one trial for the page: identity, progress, curves, evaluations, notes and ledger.

It follows the growing files and keeps their content in bounded memory. Not safe for several threads at a time: the
``Desk`` of the app lets one request in.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys import __version__
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import role_settings
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.errors import RealsysError
from realsys.manager.ledger.events import TicketEvent
from realsys.manager.ledger.journal import read_journal
from realsys.manager.ledger.ledger import Ledger
from realsys.model_files.config_json import read_model
from realsys.observe.evaluation_records import headline, incomplete_reason, without_incomplete
from realsys.observe.step_log import RESTARTS, Event, EventTail, StepTail, restarts_in_steps, undone
from realsys.observe.timeline.why import LAST, last_steps, sentence, sum_of

MOST_NOTES = 200
MOST_LEDGER_BYTES = 256 << 20  # a larger ledger is not counted


class TrialReader:
    """Reader of one trial folder. It changes nothing there."""

    def __init__(self, paths: TrialPaths, is_running: Callable[[], bool]) -> None:
        """Raises ConfigError if the folder is not a trial. ``is_running`` says if the trial's launcher lives."""
        self._paths = paths
        self._is_running = is_running
        self.config = read_config(paths.config)
        self.curves = Curves()
        self._steps = StepTail(paths.steps)
        self._event_tail = EventTail(paths.events)
        self._events: deque[Event] = deque(maxlen=MOST_NOTES)
        self._restarts = 0
        self._seen = 0  # events that the curves mark
        # Apart from the notes: many notes must not remove the marks of the curves.
        self._starts: deque[Event] = deque(maxlen=MOST_MARKS + 1)  # the first start is no mark
        self._identity: list[tuple[str, str]] | None = None
        self._ledger: tuple[int, dict[str, Any] | None] = (-1, None)  # (size of the file, its counts)

    def run(self) -> dict[str, Any]:
        """Return everything of the run but its curves."""
        self._follow()
        kind, done, total = self.curves.progress
        running = self._is_running()
        # a launcher that ends writes a summary
        if self._identity is None:
            self._identity = identity(self.config, self._paths)
        times = last_steps(self._paths.steps, LAST)
        whole = sum_of(times)
        percents = whole.percents
        parts = {name: [seconds, percents[name]] for name, seconds in whole.parts.items() if seconds > 0}
        return {
            "experiment": self.config.experiment,
            "trial": self.config.trial,
            "identity": self._identity,
            "state": "running" if running else str(self._summary().get("status") or "killed"),
            "reason": "" if running else str(self._summary().get("reason") or ""),
            "phase": self.curves.phase,
            "phase_since": self.curves.phase_since,
            "progress": {"kind": kind, "done": done, "total": total},
            "bottleneck": sentence(whole) if times else "",
            "split": {"steps": len(times), "parts": parts},
            "max_staleness": self.config.asynchronous.max_staleness,
            "evaluations": self.curves.evaluations[::-1],
            "notes": [msgspec.to_builtins(event) for event in reversed(self._events)],
            "restarts": self._restarts,
            "last_step": {key: self.curves.last.get(key) for key in ("step", "staleness", "untrained", "agreement")},
            "ledger": None if running else self._count_ledger(),
        }

    def curve_document(self, seen: int) -> dict[str, Any]:
        """Return the curves; only ``seen`` if no record was added since a document with this ``seen``."""
        self._follow()
        now = self.curves.seen + self._seen
        if now == seen:
            return {"seen": now}
        return {"seen": now, "columns": self.curves.columns(), "marks": self.curves.marks(self._starts)}

    def _follow(self) -> None:
        self.curves.add(self._steps.records())
        for event in self._event_tail.read():
            self._restarts += event.kind == "restart"
            self._events.append(event)
            if event.kind in RESTARTS:
                self._seen += 1
                self._starts.append(event)

    def _summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(self._paths.summary.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def _count_ledger(self) -> dict[str, Any] | None:
        """Count the tickets of an ended trial from its journal; None if that cannot be read, or is too large."""
        try:
            size = self._paths.ledger.stat().st_size
            if size != self._ledger[0]:
                self._ledger = (size, ledger_counts(self._paths) if size <= MOST_LEDGER_BYTES else None)
        except (OSError, RealsysError, ValueError):
            self._ledger = (-1, None)
        return self._ledger[1]


def ledger_counts(paths: TrialPaths) -> dict[str, Any]:
    """Replay the journal of a trial and return its tickets by state, as GET /status has them. Raises LedgerError."""
    state = Ledger.replaying()
    for event, _ in read_journal(paths.ledger):
        if isinstance(event, TicketEvent):
            state.apply(event)
    counts = state.counts
    return {
        "inherited": counts.inherited,
        "granted": counts.granted,
        "attempts": counts.attempts,
        **counts.by_state(),
        "dropped_by_reason": {reason: n for reason, n in counts.dropped_by_reason.items() if n},
        "reissued_by_cause": dict(counts.reissued_by_cause),
    }


def identity(config: Config, paths: TrialPaths) -> list[tuple[str, str]]:
    """Return what tells a run from others, as (name, value) for people."""
    rollout, train = config.rollout, config.train
    data = config.data.train or config.data.eval or "made by the experiment"
    training = [
        ("loss", f"{train.ppo.loss}, lr {train.optimizer.lr:g}"),
        ("batch", f"{train.batch_groups} prompts x {rollout.group_size} episodes"),
        ("staleness bound", str(config.asynchronous.max_staleness)),
        ("data", str(data)),
    ]
    return [
        ("model", _model(config, paths)),
        ("allocation", config.allocation),
        ("engine", config.generation.backend),
        *([("adapters", f"rank {train.lora.rank}")] if config.is_service else training),
        ("folder", str(paths.root)),
        ("realsys", __version__),
    ]


def _model(config: Config, paths: TrialPaths) -> str:
    name = config.model.path or "tiny, made by the experiment"
    try:
        settings = role_settings(config, ACTOR)
        parameters = read_model(settings.model_dir(paths), settings.head).parameters
    except (RealsysError, OSError):  # moved since
        return name
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if parameters >= size / 10:
            return f"{name} ({parameters / size:.1f}{unit} parameters)"
    return f"{name} ({parameters:,} parameters)"


# ---- series of the step log for the curves of the page, in bounded memory. Pure but for the tail of the log
#
#     step log ──StepTail──> Curves: points of 1, 2, 4, ... steps, so that a run of any length has at most MOST_POINTS
#                              └──document──> columns of at most SENT_POINTS
#
# A later ``recovered`` record removes the points of the steps that it undid, as ``realsys.observe.step_log`` has it.


MOST_POINTS = 4096
SENT_POINTS = 512
MOST_EVALUATIONS = 1000
MOST_MARKS = 200

Record = Mapping[str, Any]
Point = list[float | None]

#: column -> place of its number in a train record
COLUMNS: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "time": ("time",),
    "reward": ("reward_mean",),
    "accuracy": ("accuracy",),
    "length": ("length_mean",),
    "length_correct": ("length_correct",),
    "length_wrong": ("length_wrong",),
    "truncated": ("truncated_fraction",),
    "kl_step": ("stats", "kl_prox_theta_mean"),
    "kl_stale": ("stats", "kl_behav_prox_mean"),
    "kl_ref": ("stats", "kl_ref_mean"),
    "entropy": ("stats", "entropy_mean"),
    "loss": ("stats", "loss"),
    "grad_norm": ("stats", "grad_norm"),
    "clip": ("stats", "clip_fraction"),
    "tokens_s": ("consumed_tokens_per_s",),
    "train_tokens_s": ("train_tokens_per_s",),
    "stale_min": ("staleness", "min"),
    "stale_mean": ("staleness", "mean"),
    "stale_max": ("staleness", "max"),
    "wait": ("seconds", "wait"),
    "inference": ("seconds", "inf"),
    "train": ("seconds", "train"),
    "save": ("seconds", "save"),
    "publish": ("seconds", "publish"),
    "checkpoint": ("seconds", "checkpoint"),
    "biased": ("length_biased",),
}
_NAMES = list(COLUMNS)
_LOW, _HIGH = {_NAMES.index("stale_min")}, {_NAMES.index("stale_max")}
_LAST = {_NAMES.index("step"), _NAMES.index("time")}
_STEP, _TIME = _NAMES.index("step"), _NAMES.index("time")


@dataclass
class Curves:
    """Points of a run, its evaluations and its progress. ``seen`` counts records, so that a page asks for news only."""

    points: list[Point] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    phase: str = ""
    phase_since: float | None = None
    progress: tuple[str, int, int] = ("", 0, 0)  # (kind of step, done, of all)
    last: dict[str, Any] = field(default_factory=dict)  # the newest train record
    rolled_back: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))  # (time, step)
    seen: int = 0
    _width: int = 1  # steps of a point
    _open: list[Point] = field(default_factory=list)  # steps of the point that is not complete

    def add(self, records: Iterable[Record]) -> None:
        """Add the next records of the step log."""
        for record in records:
            self.seen += 1
            match record.get("kind"):
                case "phase":
                    self.phase = str(record.get("phase", "?"))
                    self.phase_since = _number(record, ("time",))
                case "warmup":
                    self.progress = ("warm-up step", _whole(record, "step"), _whole(record, "total"))
                case "train":
                    self._add_step(record)
                case "eval":
                    self.evaluations = [*self.evaluations, evaluation(record)][-MOST_EVALUATIONS:]
                case "recovered":
                    self._roll_back(record)

    def _add_step(self, record: Record) -> None:
        self.progress = ("step", _whole(record, "step"), _whole(record, "total"))
        self.last = dict(record)
        self._open.append([_number(record, place) for place in COLUMNS.values()])
        if len(self._open) < self._width:
            return
        self.points.append(merged(self._open))
        self._open = []
        if len(self.points) >= MOST_POINTS:
            self.points = _coarser(self.points, 2)
            self._width *= 2

    def _roll_back(self, record: Record) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        kind, done, total = self.progress
        if kind == "step":
            self.progress = (kind, max(0, min(done, step)), total)
        self.points = [point for point in self.points if (point[_STEP] or 0) <= step]
        self._open = [point for point in self._open if (point[_STEP] or 0) <= step]
        self.evaluations = [made for made in self.evaluations if not undone({"kind": "eval", **made}, record)]
        self.rolled_back.append((_number(record, ("time",)) or 0.0, step))

    def columns(self) -> dict[str, list[float | None]]:
        """Return column -> values, at most SENT_POINTS; a value is None if the records have no such number."""
        points = [*self.points, *([merged(self._open)] if self._open else [])]
        points = _coarser(points, math.ceil(len(points) / SENT_POINTS)) if points else []
        columns = {name: [_short(point[i]) for point in points] for i, name in enumerate(_NAMES)}
        return {name: values for name, values in columns.items() if any(value is not None for value in values)}

    def marks(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Return the newest MOST_MARKS restarts and roll-backs, in the order of the axis of steps."""
        points = [*self.points, *self._open]
        trained = [{"kind": "train", "time": point[_TIME] or 0.0, "step": point[_STEP] or 0} for point in points]
        marks = [
            {"step": step, "time": event.time, "kind": event.kind, "text": event.text}
            for step, event in restarts_in_steps(events, trained)
        ]
        marks += [
            {"step": step + 0.5, "time": time, "kind": "rolled_back", "text": f"training went back to step {step}"}
            for time, step in self.rolled_back
        ]
        newest = sorted(marks, key=lambda mark: mark["time"])[-MOST_MARKS:]
        return sorted(newest, key=lambda mark: mark["step"])


def evaluation(record: Record) -> dict[str, Any]:
    """Return an evaluation of the step log for the page. An incomplete one has no numbers, and says why."""
    kept = without_incomplete(record)
    names = ("eval_id", "set", "step", "version", "accuracy", "interval", "reward_mean", "length_mean", "time")
    return {
        **{name: kept.get(name) for name in names},
        "held_out": record.get("set") in (None, HELD_OUT),
        "incomplete": incomplete_reason(record),
        "headline": headline(record),
    }


def merged(points: Sequence[Point]) -> Point:
    """Return one point for several steps: means, the extremes of staleness, the last step."""
    if len(points) == 1:
        return points[0]
    return [_merge(i, [point[i] for point in points]) for i in range(len(_NAMES))]


def _merge(column: int, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if column in _LAST:
        return known[-1]
    if column in _LOW or column in _HIGH:
        return min(known) if column in _LOW else max(known)
    return sum(known) / len(known)


def _coarser(points: Sequence[Point], width: int) -> list[Point]:
    return [merged(points[start : start + width]) for start in range(0, len(points), width)]


def _number(record: Any, place: Iterable[str]) -> float | None:
    """Return the finite number at a place of nested mappings, or None."""
    for key in place:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    if not isinstance(record, int | float):
        return None
    return float(record) if math.isfinite(record) else None


def _whole(record: Record, name: str) -> int:
    return int(_number(record, (name,)) or 0)


def _short(value: float | None) -> float | None:
    """Return a number with 7 digits, or all of a whole number: a clock time needs more."""
    return value if value is None or value.is_integer() else float(f"{value:.7g}") if abs(value) < 1e6 else value

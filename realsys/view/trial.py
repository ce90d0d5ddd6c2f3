"""Reader of one trial for the page: identity, progress, curves, evaluations, notes and ledger.

It follows the growing files and keeps their content in bounded memory. Not safe for several threads at a time: the
``Desk`` of the app lets one request in.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from realsys import __version__
from realsys.config.allocation import ACTOR
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.errors import RealsysError
from realsys.hf.config import read_model
from realsys.manager.ledger.events import TicketEvent
from realsys.manager.ledger.journal import read_journal
from realsys.manager.ledger.ledger import Ledger
from realsys.observe.events import RESTARTS, Event, EventTail
from realsys.observe.step_log import StepTail
from realsys.timeline.step_times import last_steps, sum_of
from realsys.timeline.why import LAST, sentence
from realsys.view.curves import MOST_MARKS, Curves

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
        return {
            "experiment": self.config.experiment,
            "trial": self.config.trial,
            "identity": self._identify(),
            "state": "running" if running else self._ended(),
            "reason": "" if running else str(self._summary().get("reason") or ""),
            "phase": self.curves.phase,
            "phase_since": self.curves.phase_since,
            "progress": {"kind": kind, "done": done, "total": total},
            **self._split(),
            "eta": self.config.asynchronous.max_head_offpolicyness,
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

    def _split(self) -> dict[str, Any]:
        """Return the sentence on the bottleneck, and seconds and percentages of the parts of the last steps."""
        times = last_steps(self._paths.steps, LAST)
        whole = sum_of(times)
        percents = whole.percents
        parts = {name: [seconds, percents[name]] for name, seconds in whole.parts.items() if seconds > 0}
        return {"bottleneck": sentence(whole) if times else "", "split": {"steps": len(times), "parts": parts}}

    def _follow(self) -> None:
        self.curves.add(self._steps.records())
        for event in self._event_tail.read():
            self._restarts += event.kind == "restart"
            self._events.append(event)
            if event.kind in RESTARTS:
                self._seen += 1
                self._starts.append(event)

    def _identify(self) -> list[tuple[str, str]]:
        if self._identity is None:
            self._identity = identity(self.config, self._paths)
        return self._identity

    def _summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(self._paths.summary.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def _ended(self) -> str:
        """Return the state of a trial without launcher: a launcher that ends writes a summary."""
        return str(self._summary().get("status") or "killed")

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
    return [
        ("model", _model(config, paths)),
        ("allocation", config.allocation),
        ("engine", config.generation.backend),
        ("loss", f"{train.ppo.loss}, lr {train.optimizer.lr:g}"),
        ("batch", f"{train.batch_groups} prompts x {rollout.group_size} episodes"),
        ("staleness bound", f"eta {config.asynchronous.max_head_offpolicyness}"),
        ("data", str(data)),
        ("folder", str(paths.root)),
        ("realsys", __version__),
    ]


def _model(config: Config, paths: TrialPaths) -> str:
    name = config.model.path or "tiny, made by the experiment"
    try:
        parameters = read_model(role_settings(config, ACTOR).model_dir(paths)).parameters
    except (RealsysError, OSError):  # moved since
        return name
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if parameters >= size / 10:
            return f"{name} ({parameters / size:.1f}{unit} parameters)"
    return f"{name} ({parameters:,} parameters)"

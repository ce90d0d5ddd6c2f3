"""State of a running trial for the display, from step records and the manager's status. Pure.

It keeps the newest records only, whatever the length of the run; the report reads the step log again. A field that a
record or the status lacks is None: a display must never stop a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from realsys.cluster.aio import full_disk
from realsys.cluster.names.connect import is_known, make_name_store, trial_names
from realsys.cluster.names.contract import Names, NameStore
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import NameStoreError
from realsys.observe.evaluation_records import without_incomplete
from realsys.observe.signal import DriftWatch, SignalWatch
from realsys.observe.step_log import StepTail, undone

Record = Mapping[str, Any]

#: The parts a train step's time is split into, in the order they happen.
TIME_PARTS = ("wait", "switch", "inf", "train", "save", "publish", "checkpoint")
OTHER = "other"  # time of a step that belongs to no part

WINDOW = 192  # steps that are shown: 8 for each character of a sparkline
SHOWN_EVALS = 5  # of each data set: the first and the newest


@dataclass(slots=True)
class TrialProgress:
    """The state of a run as the launcher knows it: constant memory."""

    phase: str = "starting"
    phase_since: float | None = None
    warmup: deque[Record] = field(default_factory=lambda: deque(maxlen=WINDOW))
    train: deque[Record] = field(default_factory=lambda: deque(maxlen=WINDOW))
    evals: dict[str, Record] = field(default_factory=dict)
    status: Record = field(default_factory=dict)  # GET /status of the manager
    address: str | None = None  # address of the manager
    key: str = ""  # what the manager's pages ask for; shown on a terminal only
    _trained: tuple[int, int] | None = None  # (steps done, all steps) after the first step; for the warm-up:
    _warmed_up: tuple[int, int] = (0, 0)

    @property
    def page(self) -> str:
        """Address of the status page."""
        return f"{self.address}/" + (f"#key={self.key}" if self.key else "")

    def read(self, steps: Path) -> None:
        """Add all records of a step log that may not exist."""
        self.add(StepTail(steps).records())

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            match record.get("kind"):
                case "phase":
                    self.phase = str(record.get("phase", "?"))
                    self.phase_since = number(record, "time")
                case "warmup":
                    self.warmup.append(record)
                    self._warmed_up = _count(record)
                case "train":
                    self.train.append(record)
                    self._trained = _count(record)
                case "eval":
                    self.evals[str(record.get("eval_id", "?"))] = without_incomplete(record)
                    same = [name for name, each in self.evals.items() if each.get("set") == record.get("set")]
                    if len(same) > SHOWN_EVALS:
                        del self.evals[same[1]]
                case "recovered":
                    self._go_back(record)

    def _go_back(self, recovered: Record) -> None:
        """Remove the records that a recovery undid: the steps happen again. Steps before the window stay done."""
        self.train = deque((record for record in self.train if not undone(record, recovered)), WINDOW)
        self.warmup = deque((record for record in self.warmup if not undone(record, recovered)), WINDOW)
        self.evals = {name: record for name, record in self.evals.items() if not undone(record, recovered)}
        back = recovered.get("step")
        if isinstance(back, int) and self._trained is not None:
            self._trained = (min(self._trained[0], back), self._trained[1]) if back > 0 else None
        if not self.warmup:
            self._warmed_up = (0, 0)

    @property
    def step(self) -> tuple[int, int]:
        """Return (steps done, all steps) of the current phase."""
        return self._warmed_up if self._trained is None else self._trained


def _count(record: Record) -> tuple[int, int]:
    return int(number(record, "step") or 0), int(number(record, "total") or 0)


def number(record: object, *path: str) -> float | None:
    """Return the number at ``path`` of nested mappings, or None."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    if not isinstance(record, int | float) or isinstance(record, bool):
        return None
    try:
        return float(record)
    except OverflowError:
        return None


def time_parts(seconds: Mapping[str, float | None]) -> dict[str, float]:
    """Return the parts of a step's ``seconds`` without ``total``, and OTHER: together they are the total."""
    known = {part: value for part in (*TIME_PARTS, *seconds) if (value := seconds.get(part)) is not None}
    total = known.pop("total", 0.0)  # the rest is parts
    return known | {OTHER: max(0.0, total - sum(known.values()))} if known else {}


def mean(records: Iterable[Record], *path: str) -> float | None:
    """Return the mean over the records that have a number at ``path``."""
    values = [v for v in (number(r, *path) for r in records) if v is not None]
    return sum(values) / len(values) if values else None


# ---- keeps a Progress up to date while a trial runs, from the step log and the manager's status


_REFRESH_S = 1.0
_STATUS_TIMEOUT_S = 2.0


class Screen(Protocol):
    """Display of the progress."""

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None: ...
    def note(self, text: str) -> None: ...


class Monitor:
    """Task that refreshes ``progress`` and the screen about once a second until it is cancelled.

    It reads the manager's address from the name store again when the manager does not answer: a restarted manager has
    a new one.
    """

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        progress: TrialProgress,
        screen: Screen,
        tail: StepTail,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """``note`` takes warnings of the monitor itself; without it the screen gets them."""
        self._config = config
        self._note = note or screen.note
        self._paths = paths
        self._progress = progress
        self._screen = screen
        self._tail = tail
        self._store: NameStore | None = None
        self._full = ""  # the full disk, as it was last seen
        self._signal, self._drift = SignalWatch(config.train.ppo.advantage.mean), DriftWatch()

    def read_steps(self) -> None:
        """Read the records that the MasterWorker wrote since the last call."""
        new = self._tail.read()
        self._progress.add(new)
        self._screen.refresh(self._progress, new)
        before = number(self._progress.evals.get("before", {}), "accuracy")
        for record in new:
            if record.get("kind") == "train":
                for warning in filter(None, (self._signal.observe(record, before), *self._drift.observe(record))):
                    self._note(warning)

    def check_disk(self) -> None:
        """Say once that the disk is full: until a process fails for it, the run would only seem slow."""
        problem, before = full_disk(self._paths.root), self._full
        self._full = problem
        if problem and not before:
            self._note(problem)

    async def run(self) -> None:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STATUS_TIMEOUT_S)) as session:
                while True:
                    await self._look(session)
                    await asyncio.sleep(_REFRESH_S)
        finally:
            if self._store is not None:
                self._store.close()

    async def _look(self, session: aiohttp.ClientSession) -> None:
        if self._store is None and is_known(self._config, self._paths):
            self._store = await asyncio.to_thread(make_name_store, self._config, self._paths)
        if self._store is not None:
            await self.ask_manager(session, self._store)
        self.read_steps()
        self.check_disk()

    async def ask_manager(self, session: aiohttp.ClientSession, store: NameStore) -> None:
        """Read the manager's status; without an answer the last one stays."""
        progress = self._progress
        if progress.address is None:
            progress.address = await asyncio.to_thread(_lookup, store, trial_names(self._config))
            if progress.address is None:
                return
            if sys.stdout.isatty():
                with contextlib.suppress(OSError):
                    progress.key = self._paths.token.read_text("ascii")
        try:
            async with session.get(f"{progress.address}/status") as response:
                response.raise_for_status()
                status = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            progress.address = None
            return
        if isinstance(status, dict):
            progress.status = status


async def ask_once(config: Config, paths: TrialPaths, progress: TrialProgress) -> None:
    """Bring ``progress`` up to date from the manager, if it answers. The step log is not read."""
    monitor = Monitor(config, paths, progress, NoScreen(), StepTail(paths.steps))
    if not is_known(config, paths):
        return
    try:
        store = await asyncio.to_thread(make_name_store, config, paths)
    except NameStoreError:  # a folder without write permission
        return
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_STATUS_TIMEOUT_S)) as session:
            await monitor.ask_manager(session, store)
    finally:
        store.close()


class NoScreen:
    """Screen that shows nothing."""

    def refresh(self, progress: TrialProgress, new: Iterable[Record] = ()) -> None:
        return None

    def note(self, text: str) -> None:
        return None


def _lookup(store: NameStore, names: Names) -> str | None:
    try:
        return store.get(names.gserver_manager)
    except NameStoreError:
        return None

"""Shows a running trial: a live display on a terminal, one line per step otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from realsys.config.allocation import parse_allocation
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.launch.screen.live_lines import Frame, lines
from realsys.launch.screen.plain import PlainView
from realsys.launch.screen.progress import Progress, Record
from realsys.telemetry.events import read_events

_RECENT_NOTES = 8


class View(Protocol):
    """Display of the progress of a run. A context manager: it owns the terminal while it is open."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        """Show ``progress``; ``new`` are its records that were not shown yet."""
        ...


def make_view(console: Console, config: Config, paths: TrialPaths, *, plain: bool) -> View:
    """Make a live view on a terminal, and a plain one for a file, a pipe or on request."""
    if plain or not console.is_terminal:
        return PlainView(console)
    return LiveView(console, config, paths)


class LiveView:
    """View that redraws the screen once a second."""

    def __init__(self, console: Console, config: Config, paths: TrialPaths) -> None:
        self._config, self._paths = config, paths
        self._expected = expected_workers(config)
        self._started = time.time()
        self._progress = Progress()
        self._notes: deque[str] = deque(maxlen=_RECENT_NOTES)
        self._live = Live(console=console, auto_refresh=False, get_renderable=lambda: self, transient=False)

    def __enter__(self) -> Self:
        # The start of the run, also for a display that is opened later.
        starts = [event.time for event in read_events(self._paths.events) if event.kind == "start"]
        self._started = starts[-1] if starts else self._started
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.refresh()
        self._live.stop()

    def note(self, text: str) -> None:
        # A path of the trial is written from its folder on: else it would hide the cause on a narrow terminal.
        self._notes.append(f"{time.strftime('%H:%M:%S')} {text.replace(f'{self._paths.root}/', '')}")
        self._live.refresh()

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        self._progress = progress
        self._live.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        config = self._config
        frame = Frame(
            f"{config.experiment}/{config.trial}",
            str(self._paths.root),
            config.asynchronous.max_head_offpolicyness,
            self._expected,
            list(self._notes),
            max(0.0, time.time() - self._started),
            max(0.0, time.time() - (self._progress.phase_since or self._started)),
        )
        width, height = options.size  # the last column and row stay free: a terminal would scroll
        for line in lines(self._progress, frame, width - 1, height - 1):
            yield from line.render(console)
            yield Segment.line()


def expected_workers(config: Config) -> list[str]:
    """Return the names of the processes whose heartbeats the manager sees, in the order of their start."""
    allocation = parse_allocation(config.allocation)
    counts = {
        "gserver_manager": 1,
        "generation_server": allocation.inference.data,
        "model_worker": allocation.workers,
        "reward_service": config.rollout.reward.services,
        "rollout_worker": config.rollout.workers,
    }
    return [f"{kind}/{index}" for kind, count in counts.items() for index in range(count)]

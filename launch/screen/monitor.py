"""Keeps a Progress up to date while a trial runs, from the step log and the manager's status."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import aiohttp

from realsys.cluster.store.base import NameStore
from realsys.cluster.store.connect import is_known, make_name_store, trial_names
from realsys.cluster.store.names import Names
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import NameStoreError
from realsys.launch.processes.failures import full_disk
from realsys.launch.screen.progress import Progress, Record, number
from realsys.telemetry.signal import SignalWatch
from realsys.telemetry.steps import StepTail

_REFRESH_S = 1.0
_STATUS_TIMEOUT_S = 2.0


class Screen(Protocol):
    """Display of the progress."""

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None: ...
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
        progress: Progress,
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
        self._signal = SignalWatch(config.train.ppo.advantage.mean)

    def read_steps(self) -> None:
        """Read the records that the MasterWorker wrote since the last call."""
        new = self._tail.read()
        self._progress.add(new)
        self._screen.refresh(self._progress, new)
        before = number(self._progress.evals.get("before", {}), "accuracy")
        for record in new:
            if record.get("kind") == "train" and (warning := self._signal.observe(record, before)):
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


async def ask_once(config: Config, paths: TrialPaths, progress: Progress) -> None:
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

    def refresh(self, progress: Progress, new: Iterable[Record] = ()) -> None:
        return None

    def note(self, text: str) -> None:
        return None


def _lookup(store: NameStore, names: Names) -> str | None:
    try:
        return store.get(names.gserver_manager)
    except NameStoreError:
        return None

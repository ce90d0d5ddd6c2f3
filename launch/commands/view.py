"""Serve the status page and the sample viewer of a trial on this machine, whether it runs or has ended.

The trial is only read. Print the address, which has the key of the page; Ctrl-C ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from argparse import ArgumentParser, Namespace
from typing import Any

import aiohttp

from realsys.cluster.names.connect import is_known, make_name_store
from realsys.cluster.names.contract import NameStore
from realsys.config.paths import TrialPaths, read_config
from realsys.config.schema import Config
from realsys.errors import ConfigError, NameStoreError
from realsys.launch.commands.options import add_newest_trial, find_trial
from realsys.launch.trial_folder import is_held
from realsys.observe.page.app import serve_view
from realsys.observe.screen.progress import Monitor, NoScreen, TrialProgress
from realsys.observe.step_log import StepTail

_TIMEOUT_S = 3.0


def add_arguments(parser: ArgumentParser) -> None:
    add_newest_trial(parser)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")


def run(args: Namespace) -> int:
    """Serve until Ctrl-C. Raises RealsysError."""
    if not 0 <= args.port < 65536:
        raise ConfigError("--port", args.port, "must be 0 (any free port) to 65535")
    paths = find_trial(args.trial_dir)
    config = read_config(paths.config)
    with contextlib.closing(ManagerStatus(config, paths)) as live:
        about = f"{config.experiment}/{config.trial}: open the address below in a browser; Ctrl-C ends the server"
        serve_view(paths, live.read, live.is_running, args.port, about=about)
    return 0


class ManagerStatus:
    """GET /status of the manager of a trial that runs. It keeps the name store open."""

    def __init__(self, config: Config, paths: TrialPaths) -> None:
        self._config = config
        self._paths = paths
        self._store: NameStore | None = None
        self._progress = TrialProgress()
        self._monitor = Monitor(config, paths, self._progress, NoScreen(), StepTail(paths.steps))

    def is_running(self) -> bool:
        """Return True if the launcher or a worker of the trial lives."""
        return is_held(self._paths.lock)

    async def read(self) -> dict[str, Any] | None:
        """Return the status; None if no manager answers."""
        if not await asyncio.to_thread(self.is_running):
            return None
        try:
            if self._store is None and is_known(self._config, self._paths):
                self._store = await asyncio.to_thread(make_name_store, self._config, self._paths)
        except NameStoreError:
            return None
        if self._store is None:
            return None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            await self._monitor.ask_manager(session, self._store)
        return dict(self._progress.status) if self._progress.address is not None else None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

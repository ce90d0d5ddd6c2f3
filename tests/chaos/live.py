"""A run under faults, as the driver sees it: gates, step log, name store, ledger."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realsys.cluster.name_store import NameStore, make_name_store, trial_names
from realsys.cluster.names import Names
from realsys.config.dump import read_config
from realsys.telemetry.steps import StepTail
from tests.system.jobs import POLL_S, LiveJob


class Ended(Exception):
    """The run is over, though the driver waited for something."""


@dataclass
class ChaosRun:
    """``faults``: folder of markers and gates. ``addresses``: what the run's sockets were bound to, as far as seen."""

    live: LiveJob
    faults: Path
    addresses: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tail = StepTail(self.live.job.paths.steps)
        self._done = 0

    @property
    def root(self) -> Path:
        return self.live.root

    def steps(self) -> int:
        """Train steps that stand: a recovery takes back those after its checkpoint."""
        for record in self._tail.read():
            if record["kind"] == "train":
                self._done = record["step"]
            elif record["kind"] == "recovered":
                self._done = max(0, record["step"])
        return self._done

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Poll a black box until the condition is true. Raises Ended, or TimeoutError naming what did not come."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if self.live.process.poll() is not None:
                raise Ended(what)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)
        return value

    def until_step(self, step: int, timeout_s: float) -> None:
        self.until(lambda: self.steps() >= step, f"train step {step}", timeout_s)

    def open_gate(self, number: int) -> None:
        (self.faults / f"go-{number}").touch()

    def see_addresses(self) -> None:
        """Remember where the run's processes listen now."""
        store, names = self.name_store()
        try:
            for key in ("gserver_manager", "generation_server", "pull", "request_reply"):
                for value in store.get_subtree(f"{names.root}/{key}").values():
                    self.addresses.add(json.loads(value)["url"] if value.startswith("{") else value)
        finally:
            store.close()

    def name_store(self) -> tuple[NameStore, Names]:
        """A connection of the driver's own, to be closed."""
        config = read_config(self.live.job.paths.config)
        return make_name_store(config, self.live.job.paths), trial_names(config)

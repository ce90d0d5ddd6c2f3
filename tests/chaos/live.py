"""A run under faults, as the driver sees it: gates, step log, name store, processes, agents, a fast end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.cluster.names.contract import Names, NameStore
from realsys.config.paths import read_config
from realsys.observe.step_log import StepTail
from tests.chaos.kept_agents import Agents
from tests.support.faults.plan import note_pid, pid_of
from tests.support.jobs.jobs import LiveJob, processes_of
from tests.support.polling import poll

_ASK_AGAIN_S = 0.2  # pause between two SIGTERMs to the launcher
_HURRY_S = 5.0  # after this the launcher gets SIGKILL


class Ended(Exception):
    """The run ended while the driver waited for something."""


class Interrupted(Exception):
    """A signal asks the chaos run to end."""


@dataclass
class ChaosRun:
    """``faults``: folder of markers and gates. ``addresses``: what the run's sockets were bound to, as far as seen.

    Once ``stop`` is set, every wait raises Interrupted.
    """

    live: LiveJob
    faults: Path
    agents: Agents
    stop: threading.Event = field(default_factory=threading.Event)
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
        """Return the value of the condition once it is true.

        Raises Ended, Interrupted, or WaitTimeout, which names the condition.
        """

        def look() -> Any:
            if value := condition():
                return value
            if self.live.process.poll() is not None:
                raise Ended(what)
            if self.stop.is_set():
                raise Interrupted
            self.agents.tend()
            return None

        return poll(look, what, timeout_s)

    def until_step(self, step: int, timeout_s: float) -> None:
        self.until(lambda: self.steps() >= step, f"train step {step}", timeout_s)

    def until_end(self, timeout_s: float) -> None:
        """Raises Interrupted, or WaitTimeout."""
        with contextlib.suppress(Ended):
            self.until(lambda: False, "the end of the run", timeout_s)

    def end_now(self) -> None:
        """End every process of the run, whether or not it has finished its work."""
        deadline = time.monotonic() + _HURRY_S
        while self.live.process.poll() is None and time.monotonic() < deadline:
            self.live.process.terminate()  # the second signal skips the checkpoint
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.live.process.wait(_ASK_AGAIN_S)
        self.live.process.kill()
        self.live.process.wait()
        for line in processes_of(self.root):  # wakers of suspended processes, and children of a killed launcher
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)

    def output_lengths(self) -> dict[Path, int]:
        """Return the length of each output of launcher and agents."""
        return {path: path.stat().st_size for path in self._outputs()}

    def has_said(self, pattern: str, since: Mapping[Path, int]) -> bool:
        """Return True if an output matches ``pattern`` beyond the lengths of ``since``."""
        texts = (path.read_bytes()[since.get(path, 0) :].decode(errors="replace") for path in self._outputs())
        return any(re.search(pattern, text) for text in texts)

    def _outputs(self) -> list[Path]:
        return [self.live.output[0], *self.agents.outputs()]

    def open_gate(self, number: int) -> None:
        (self.faults / f"go-{number}").touch()

    def note_pids(self) -> None:
        """Note the pids of processes that are no workers, so that a fault can name them as its victim."""
        for worker, pid in [*self.agents.of_nodes(), *self._others()]:
            note_pid(self.faults, worker, pid)

    def _others(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            executors = [psutil.Process(pid) for pid in self.agents.pids() or [self.live.process.pid]]
            for child in (child for executor in executors for child in executor.children()):
                if child.name() == "etcd":
                    yield "name_store/0", child.pid
            for guard in psutil.Process(pid_of(self.faults, "generation_server/0")).children():
                if any(part.endswith("/guard.py") for part in guard.cmdline()):
                    yield from (("sglang/0", child.pid) for child in guard.children())

    def see_addresses(self) -> None:
        """Remember where the run's processes listen now."""
        store, names = self.name_store()
        try:
            for key in ("gserver_manager", "generation_server", "pull", "trainer/request_reply"):
                for value in store.get_subtree(f"{names.root}/{key}").values():
                    found = json.loads(value) if value.startswith("{") else {"url": value}
                    self.addresses.add(found.get("url") or found["address"])
        finally:
            store.close()

    def name_store(self) -> tuple[NameStore, Names]:
        """Open a connection; the caller closes it."""
        config = read_config(self.live.job.paths.config)
        return make_name_store(config, self.live.job.paths), trial_names(config)

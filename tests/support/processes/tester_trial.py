"""A trial folder in which scripts run as worker ``tester``: real processes, a real name store."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.cluster.names.contract import NameStore
from realsys.cluster.process import read_errors
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.config.schema_cluster import ClusterConfig, NameStoreConfig

BOUND_S = 120.0
PRELUDE = """
import logging, os, signal, sys, threading
from realsys.cluster.worker import worker_main
from realsys.errors import RewardError

def quick():
    ctx.register(ctx.names.root + "/ready", ctx.incarnation)

def show_beats():  # the key changes with each beat; counters in a heartbeat change every 30 s only
    beats = iter(range(1 << 30))
    ctx.count(lambda: ctx.register(ctx.names.root + "/beats", str(next(beats))) or {{}})

def body(context):
    global ctx
    ctx = context
    {body}

worker_main("tester", body)
"""


class Trial:
    """``lease_s``: long, so that a slow machine does not end it, except where a test waits for its end."""

    def __init__(self, folder: Path, *, lease_s: float = 600.0, stop_timeout_s: float = 0.5, **name_store: Any) -> None:
        settings = NameStoreConfig(**name_store)
        cluster = ClusterConfig(heartbeat_s=0.1, lease_s=lease_s, stop_timeout_s=stop_timeout_s, name_store=settings)
        self.config = Config(fileroot=str(folder), cluster=cluster)
        self.paths = TrialPaths.of(self.config)
        self.paths.root.mkdir(parents=True)
        write_config(self.config, self.paths.config)
        self.paths.token.write_text("secret\n")
        self.names = trial_names(self.config)
        self.store: NameStore = make_name_store(self.config, self.paths)
        self._started: list[subprocess.Popen[str]] = []

    def start(self, body: str, index: int = 0, **environment: str) -> subprocess.Popen[str]:
        return self.run(PRELUDE.format(body=body), index, **environment)

    def run(self, code: str, index: int = 0, **environment: str) -> subprocess.Popen[str]:
        """``code`` calls ``worker_main``."""
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--trial-dir", str(self.paths.root), "--index", str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._started.append(process)
        return process

    def ready(self) -> str:
        """Wait until a body has called ``quick()``; its incarnation."""
        return self.store.wait(f"{self.names.root}/ready", BOUND_S, "the tester")

    def logged(self, process: subprocess.Popen[str], text: str) -> None:
        """Wait until its log has a line with ``text``. ``ends`` then returns only later lines."""
        assert process.stderr is not None
        watchdog = threading.Timer(BOUND_S, process.kill)
        watchdog.start()
        try:
            assert any(text in line for line in process.stderr), f"ended without logging {text!r}"
        finally:
            watchdog.cancel()
            watchdog.join()

    def suspend(self, process: subprocess.Popen[str]) -> None:
        """Stop it, and return when its lease has lapsed."""
        process.send_signal(signal.SIGSTOP)
        self.gone(self.names.root)

    def gone(self, key: str) -> None:
        self.until(key, lambda tree: not tree)

    def until(self, key: str, holds: Callable[[dict[str, str]], bool]) -> None:
        happened = threading.Event()
        with self.store.watch(key, lambda tree: happened.set() if holds(tree) else None):
            assert happened.wait(BOUND_S), f"{key} stayed at {self.store.get_subtree(key)}"

    def until_beat(self) -> None:
        """Wait for the next beat of a worker whose body has called ``show_beats()``."""
        key = f"{self.names.root}/beats"
        before = self.store.get(key)
        self.until(key, lambda tree: tree.get(key, before) != before)

    def ends(self, process: subprocess.Popen[str], code: int) -> str:
        """Its log, once it has ended with ``code``."""
        _, log = process.communicate(timeout=BOUND_S)
        assert process.returncode == code, log
        return log

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.store.close()


#: writes the last value that its watch on "asked" delivered to the key "seen"
FOLLOWER = """
    root = ctx.names.root
    watch = ctx.store.watch(root + "/asked", lambda tree: ctx.register(root + "/seen", "".join(tree.values()) or "-"))
    show_beats()
    quick()
    ctx.stop.wait()
    watch.close()
""".strip()


class Follower:
    """A worker with a watch, and what another process sees of it all the time."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.root = trial, trial.names.root
        self.heartbeat = trial.names.heartbeat("tester/0")
        self.process = trial.start(FOLLOWER)
        trial.ready()
        trial.until(f"{self.root}/seen", lambda tree: "-" in tree.values())
        self.before = json.loads(trial.store.get(self.heartbeat))
        self.missing = 0
        self._watch = trial.store.watch(self.heartbeat, self._look)

    def _look(self, tree: dict[str, str]) -> None:
        self.missing += not tree

    def goes_on(self) -> None:
        """The same incarnation beats, its keys were never gone, and its watch misses nothing."""
        other = make_name_store(self.trial.config, self.trial.paths)
        other.add(f"{self.root}/asked", "now", replace=True)
        other.close()
        self.trial.until(f"{self.root}/seen", lambda tree: "now" in tree.values())
        self.trial.until_beat()
        after = json.loads(self.trial.store.get(self.heartbeat))
        assert (after["incarnation"], after["pid"]) == (self.before["incarnation"], self.process.pid)
        self._watch.close()
        assert self.missing == 0
        self.process.terminate()
        self.trial.ends(self.process, 0)
        assert read_errors(self.trial.paths.errors) == []

"""The process of the trackers, with trackers of a user that print, fail, hang and crash."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from realsys.config.compose import compose
from realsys.config.paths import TrialPaths
from realsys.observe.trackers import link
from realsys.observe.trackers.link import Trackers
from realsys.observe.trackers.tensorboard import EventFile
from tests.support.polling import poll
from tests.support.run_logs import append, train

pytestmark = pytest.mark.processes

BOUND_S = 60.0
MODULE = """
import os, signal, sys, time
from realsys.observe.trackers.contract import Tracker

class Printing(Tracker):
    def __init__(self, run, name="calls"):
        super().__init__(run)
        self.file = open(run.folder / name, "a")
        self.log_line(run.config["experiment"], sorted(run.config["telemetry"]))

    def log_line(self, *words):
        print("library output", file=sys.stdout)
        print(*words, file=self.file, flush=True)

    def log(self, point):
        self.log_line(point.kind, point.step, os.nice(0))

    def close(self, status):
        self.log_line("closed", status)

class Hanging(Printing):
    def log(self, point):
        self.log_line("hangs")
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1000)

class Failing(Printing):
    def log(self, point):
        raise OSError("no space")

class Signalled(Printing):
    def log(self, point):
        os.kill(os.getpid(), signal.SIGTERM)
        self.log_line("signalled", point.step)

class Crashing(Printing):
    def log(self, point):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


class Trial:
    """A trial folder and what the trackers of a run said."""

    def __init__(self, folder):
        self.folder, self.said = folder, list[str]()

    def follow(self, *trackers, status="done", until=bool, **settings):
        """Run the trackers until ``until`` holds; return how long their end took, in seconds."""
        listed = json.dumps(list(trackers))
        extra = [f"telemetry.{name}={value}" for name, value in settings.items()]
        fixed = [f"fileroot={self.folder}", "trial=t", f"telemetry.trackers={listed}"]
        config = compose(["experiment=arith", *fixed, *extra])
        self.paths = TrialPaths.of(config)

        async def run():
            async with Trackers(config, self.paths, self.said.append) as made:
                append(self.paths.steps, train(1), train(2))
                await asyncio.to_thread(poll, until, "the trackers", BOUND_S)
                made.status = status
                began = time.monotonic()
            return time.monotonic() - began

        TrialPaths.of(config).root.mkdir(parents=True, exist_ok=True)
        return asyncio.run(run())

    def calls(self):
        path = self.folder / "arith" / "t" / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def trial(tmp_path, monkeypatch):
    (tmp_path / "own_tracker.py").write_text(MODULE)
    root = Path(__file__).resolve().parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    return Trial(tmp_path)


def test_default_trackers_write_their_files(trial):
    trial.follow("file", "tensorboard", until=lambda: True)
    lines = [json.loads(line) for line in (trial.paths.metrics).read_text().splitlines()]
    assert [(line["step"], line["train/reward_mean"]) for line in lines] == [(1, 10.0), (2, 20.0)]
    assert len(list((trial.paths.tensorboard / "train").iterdir())) == 1 and trial.said == []


def test_own_tracker_gets_points_and_the_end(trial):
    trial.follow("own_tracker:Printing", status="interrupted", until=lambda: len(trial.calls()) == 3)
    priority = min(19, os.nice(0) + 10)
    assert trial.calls()[1:] == [f"train 1 {priority}", f"train 2 {priority}", "closed interrupted"]
    assert "tracker_args" not in trial.calls()[0] and trial.said == []
    assert "library output" in (trial.paths.logs / "trackers.log").read_text()


def test_hanging_tracker_delays_no_other_nor_the_end(trial, monkeypatch):
    monkeypatch.setattr(link, "FINISH_S", 1.0)

    def done():
        return bool(trial.calls()) and trial.paths.metrics.exists() and trial.paths.metrics.read_text().count("\n") == 2

    took = trial.follow("own_tracker:Hanging", "file", until=done)
    assert took < 5.0
    assert [text for text in trial.said if "own_tracker:Hanging did not finish within 1 s" in text]


def test_stop_waits_a_second_for_hanging_trackers(trial):
    took = trial.follow("own_tracker:Hanging", status="interrupted", until=trial.calls)
    assert took < 5.0 and len(trial.said) == 1


def test_failing_tracker_is_a_note(trial):
    trial.follow("own_tracker:Failing", "file", until=lambda: trial.said)
    assert "tracker own_tracker:Failing failed: OSError: no space: the run goes on" in trial.said[0]
    assert len(trial.paths.metrics.read_text().splitlines()) == 2


def test_crash_is_a_note_during_the_run(trial):
    trial.follow("own_tracker:Crashing", until=lambda: trial.said)
    log = trial.paths.logs / "trackers.log"
    assert trial.said == [
        f"the process of the trackers was killed by SIGSEGV ({log}): the run goes on without trackers"
    ]


def test_signal_of_a_batch_system_ends_no_tracker(trial):
    trial.follow("own_tracker:Signalled", until=lambda: len(trial.calls()) == 3)
    assert trial.calls()[1:] == ["signalled 1", "signalled 2", "closed done"] and trial.said == []


def test_no_tracker_starts_no_process(trial, monkeypatch):
    monkeypatch.setattr(EventFile, "__init__", None)
    trial.follow(until=lambda: True)
    assert not (trial.paths.logs / "trackers.log").exists()

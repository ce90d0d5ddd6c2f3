"""`realsys status` of trials that have ended, were killed, or run."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.launch.cli import main
from realsys.launch.commands import status
from realsys.launch.commands.status import Observer
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.trial_folder import TrialLock
from realsys.launch.words import own_command
from realsys.observe.screen.progress import TrialProgress
from realsys.observe.step_log import EventLog
from tests.support.run_logs import run_records, train_record, write_log


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialPaths:
    monkeypatch.chdir(tmp_path)
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    write_log(paths, [*run_records()[:5], *(train_record(step, total=100) for step in range(1, 41))])
    return paths


@pytest.fixture
def running(trial: TrialPaths) -> Iterator[TrialLock]:
    lock = TrialLock(trial.lock, "t", retry_timeout_s=0.0)
    yield lock
    with contextlib.suppress(OSError):  # the test has closed it
        lock.close()


def test_killed_trial_shows_steps_and_resume_command(trial: TrialPaths, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog(trial.events)
    events.add("start", "9 processes")
    events.add("restart", "rollout_worker/0 was killed; restart 1/5", "rollout_worker/0")
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "math/t: killed, phase train, step 40/100"
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")]
    assert steps == list(range(31, 41))
    assert any(line.startswith("! ") and "rollout_worker/0 was killed" in line for line in lines)
    assert "9 processes" not in "\n".join(lines)
    assert any(line.startswith("generation-bound: the trainer waits 10 %") for line in lines)
    assert lines[-1] == f"to continue: {' '.join(own_command())} resume runs/math/t"


def test_json_has_the_last_steps_and_evaluations(trial: TrialPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "math/t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["total_steps"]) == ("killed", 40, 100)
    assert [record["step"] for record in found["steps"]] == list(range(31, 41))
    assert [record["eval_id"] for record in found["evaluations"]] == ["before"]
    assert found["resume"].endswith("resume runs/math/t") and found["summary"] is None
    assert found["bottleneck"].startswith("generation-bound: the trainer waits 10 %")


def test_running_trial_is_not_to_be_continued(
    trial: TrialPaths, running: TrialLock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "running" and found["resume"] is None


def test_watch_shows_steps_and_restarts_until_the_end(
    trial: TrialPaths, running: TrialLock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_LOOK_S", 0.01)
    watching = threading.Thread(target=main, args=(["status", "--watch"],))
    watching.start()
    seen, deadline = "", time.monotonic() + 60

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen and time.monotonic() < deadline:
            seen += capsys.readouterr().out
            watching.join(0.02)

    events = EventLog(trial.events)
    while "was killed" not in seen and time.monotonic() < deadline:  # it shows what comes after its start
        events.add("restart", "rollout_worker/0 was killed", "rollout_worker/0")
        seen += capsys.readouterr().out
        watching.join(0.05)
    with trial.steps.open("a") as log:
        log.write(json.dumps(train_record(41, total=100)) + "\n")
    until("step  41/100")
    running.close()
    until("to continue: ")
    watching.join(60)
    assert not watching.is_alive() and "step  41/100" in seen and "! rollout_worker/0 was killed" in seen


def test_waiting_job_is_not_to_be_continued(
    trial: TrialPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first start there is no configuration to show."""
    states = iter([JobState("PENDING"), JobState("PENDING"), JobState("CANCELLED")])
    monkeypatch.setattr(status, "job_state", lambda _: next(states))
    trial.job.parent.mkdir()
    TrialJob.write(trial, "7")
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "pending" and found["resume"] is None
    trial.config.unlink()
    assert main(["status", "--json", "--watch", "0.001"]) == 0
    waits, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert waits["state"] == "pending" and waits["trial"] == "t" and ended["state"] == "cancelled"


def test_second_look_reads_new_records_only(trial: TrialPaths, running: TrialLock) -> None:
    """What was read before has changed since then."""
    observer = Observer(trial)
    assert observer.look().progress.step == (40, 100)
    trial.steps.write_bytes(trial.steps.read_bytes().replace(b'"step": 40,', b'"step": 99,'))
    with trial.steps.open("a") as log:
        log.write(json.dumps(train_record(41, total=100)) + "\n")
    EventLog(trial.events).add("note", "later")
    second = observer.look()
    assert [record["step"] for record in second.steps] == list(range(32, 42))
    assert [event.text for event in second.events] == ["later"]


@pytest.mark.parametrize("words", [["--watch", "-1"], ["--watch", "nan"], ["--watch", "0"], ["--watch", "math/t"]])
def test_watch_needs_a_duration(words: list[str], trial: TrialPaths, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json", *words])
    assert ended.value.code == 2
    assert "must be a number of seconds above 0; the trial is named before --watch" in capsys.readouterr().err


def test_json_watch_is_one_line_per_look(trial: TrialPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--watch", "0.01"]) == 0  # it does not run: one look
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["step"] == 40


def test_memory_is_in_line_and_json(
    trial: TrialPaths, running: TrialLock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(config: Config, paths: TrialPaths, progress: TrialProgress) -> None:
        progress.status = {"workers": [{"name": "rollout_worker/0", "memory_bytes": 2 << 30}]}

    monkeypatch.setattr("realsys.launch.commands.status.ask_once", answers)
    assert main(["status"]) == 0
    assert "memory: RolloutWorkers 2.0 GiB" in capsys.readouterr().out.splitlines()
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == {"rollout_worker/0": 2 << 30}

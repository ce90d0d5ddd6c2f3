"""`realsys status` of trials that have ended, were killed, or run."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths, read_config, write_config
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.launch.cli import main
from realsys.launch.commands import status
from realsys.launch.commands.status import Observer
from realsys.launch.commands.view import ManagerStatus
from realsys.launch.conclude import summarise, write_summary
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.supervise.failures import FirstFailure
from realsys.launch.supervise.restart_policy import TrialOutcome
from realsys.launch.trial_folder import TrialLock
from realsys.launch.words import own_command
from realsys.observe.step_log import EventLog
from tests.support.run_logs import run_records, train_record, write_log
from tests.support.timelines.made_up import small_trial
from tests.support.view.shown_trial import sample_trial


@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = TrialPaths(tmp_path / "runs" / "math" / "t")
    paths.root.mkdir(parents=True)
    write_config(Config(trial="t"), paths.config)
    write_log(paths, [*run_records()[:5], *(train_record(step, total=100) for step in range(1, 41))])
    return paths


@pytest.fixture
def running(trial):
    lock = TrialLock(trial.lock, "t", retry_timeout_s=0.0)
    yield lock
    with contextlib.suppress(OSError):  # the test has closed it
        lock.close()


def test_killed_trial_shows_steps_and_resume_command(trial, capsys):
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


def test_json_has_the_last_steps_and_evaluations(trial, capsys):
    assert main(["status", "math/t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["total_steps"]) == ("killed", 40, 100)
    assert [record["step"] for record in found["steps"]] == list(range(31, 41))
    assert [record["eval_id"] for record in found["evaluations"]] == ["before"]
    assert found["resume"].endswith("resume runs/math/t") and found["summary"] is None
    assert found["bottleneck"].startswith("generation-bound: the trainer waits 10 %")


def test_running_trial_is_not_to_be_continued(trial, running, capsys):
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "running" and found["resume"] is None


def test_watch_shows_steps_and_restarts_until_the_end(trial, running, capsys, monkeypatch):
    monkeypatch.setattr(status, "_LOOK_S", 0.01)
    watching = threading.Thread(target=main, args=(["status", "--watch"],))
    watching.start()
    seen, deadline = "", time.monotonic() + 60

    def until(text):
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


def test_waiting_job_is_not_to_be_continued(trial, monkeypatch, capsys):
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


def test_second_look_reads_new_records_only(trial, running):
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
def test_watch_needs_a_duration(words, trial, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json", *words])
    assert ended.value.code == 2
    assert "must be a number of seconds above 0; the trial is named before --watch" in capsys.readouterr().err


def test_json_watch_is_one_line_per_look(trial, capsys):
    assert main(["status", "--json", "--watch", "0.01"]) == 0  # it does not run: one look
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["step"] == 40


def test_memory_is_in_line_and_json(trial, running, capsys, monkeypatch):
    async def answers(config, paths, progress):
        progress.status = {"workers": [{"name": "rollout_worker/0", "memory_bytes": 2 << 30}]}

    monkeypatch.setattr("realsys.launch.commands.status.ask_once", answers)
    assert main(["status"]) == 0
    assert "memory: RolloutWorkers 2.0 GiB" in capsys.readouterr().out.splitlines()
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == {"rollout_worker/0": 2 << 30}


# ---- `realsys list` and `realsys status`: the rows of all trials, and how one ended


def made(root, name):
    paths = TrialPaths(root / "math" / name)
    paths.job.parent.mkdir(parents=True)
    write_config(Config(trial=name), paths.config)
    return paths


def test_damaged_job_file_is_one_row(tmp_path, capsys):
    TrialJob.write(made(tmp_path, "whole"), "12")
    made(tmp_path, "damaged").job.write_text("{")
    assert main(["list", str(tmp_path)]) == 0
    rows = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert "unreadable" in rows["math/damaged"] and "12" in rows["math/whole"]


def test_row_has_what_a_run_came_to(tmp_path, capsys):
    write_log(made(tmp_path, "t"), run_records()[:-2])
    made(tmp_path, "empty")
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["trial", "state", "step", "reward", "held", "out"]
    assert max(map(len, lines)) <= 80
    [row] = [line.split() for line in lines if line.startswith("math/t ")]
    assert row[:5] == ["math/t", "killed", "4/4", "+0.40", "41.0%"]
    assert main(["list", str(tmp_path), "--json"]) == 0
    found = {row["trial"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["math/t"]["accuracy"] == 0.41 and found["math/empty"]["reward"] is None


def test_held_out_column_has_no_other_data_set(tmp_path, capsys):
    """However many sets are evaluated. The number is rounded as on the status page."""
    held_out = {"kind": "eval", "eval_id": "after", "set": HELD_OUT, "step": 4, "accuracy": 0.8125}
    others = [{**held_out, "eval_id": f"after.{name}", "set": name, "accuracy": 0.25} for name in "abcdef"]
    write_log(made(tmp_path, "t"), [*run_records()[:-2], held_out, *others])
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "81.3%"


def test_status_names_the_first_failure(tmp_path, capsys):
    paths = made(tmp_path, "t")
    failure = FirstFailure("model_worker/1", 12, 100.0, "ModelError: [a] has no b", Path("/x.log"), [])
    write_summary(
        summarise(Config(), paths, TrialOutcome("failed", "x"), started=90.0, ended=100.0, failure=failure), paths
    )
    assert main(["status", str(paths.root)]) == 0
    lines = [line.split(None, 2) for line in capsys.readouterr().out.splitlines()]
    assert ["first", "failure", "model_worker/1: ModelError: [a] has no b"] in lines


def ended(tmp_path):
    paths = made(tmp_path, "t")
    write_log(paths, run_records())
    paths.final_model.mkdir()
    write_summary(summarise(Config(), paths, TrialOutcome("done", ""), started=90.0, ended=100.0), paths)
    return paths


def test_copied_trial_shows_its_own_paths(tmp_path, capsys):
    paths = ended(tmp_path)
    paths.root.rename(paths.root.with_name("moved"))
    assert main(["status", str(paths.root.with_name("moved"))]) == 0
    out = capsys.readouterr().out
    assert f"{paths.root.with_name('moved')}/model" in out and f"{paths.root}/" not in out and "!" not in out


def test_cut_off_step_log_of_an_ended_trial_is_said(tmp_path, capsys):
    paths = ended(tmp_path)
    write_log(paths, run_records()[:6])
    assert main(["status", str(paths.root)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("it has 1 of 4 steps: restore it from a copy")


# ---- `realsys why` and `realsys trace`: what they print, and their exit codes


@pytest.fixture
def timed_trial(tmp_path):
    made = small_trial(tmp_path / "trial")
    (made.root / "config.json").write_text("{}")
    return made


def test_why_prints_shares_that_add_up(timed_trial, capsys):
    assert main(["why", str(timed_trial.root)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("generation-bound: the trainer waits")
    assert re.findall(r"^sum +[\d.]+ +(\d+)", printed, re.MULTILINE) == ["100", "74", "100"]
    assert "decode 40 %" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert not re.search(r" $", printed, re.MULTILINE)  # a table fills its last column with blanks


def test_why_prints_json(timed_trial, capsys):
    assert main(["why", str(timed_trial.root), "--json", "--steps", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["covered"] == 1
    assert sum(report["waits"].values()) == pytest.approx(report["parts"]["wait"])


def test_trace_names_its_file(timed_trial, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["trace", str(timed_trial.root), "--out", str(out), "--ticket", "7"]) == 0
    assert "processes over" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize("steps", ["a:b", "1-3", "1:2:3"])
def test_unreadable_steps_are_refused(timed_trial, steps, capsys):
    with pytest.raises(SystemExit) as end:
        main(["trace", str(timed_trial.root), "--steps", steps])
    assert end.value.code == 2
    assert "must be A:B, A:, :B or N" in capsys.readouterr().err


def test_trial_without_steps_is_bad_input(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["why", str(tmp_path)]) == 2
    assert "no train step has ended" in capsys.readouterr().err


# ---- `realsys view`: bad input, and the status of a trial that has ended


def test_bad_port_is_refused(tmp_path, capsys):
    paths = sample_trial(tmp_path)
    assert main(["view", str(paths.root), "--port", "65536"]) == 2
    assert "must be 0 (any free port) to 65535" in capsys.readouterr().err


def test_busy_port_is_refused_before_an_address_is_shown(tmp_path, capsys):
    paths = sample_trial(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(paths.root), "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"--port={port}: cannot bind 127.0.0.1:{port}" in err


def test_name_of_a_trial_is_corrected(tmp_path, capsys, monkeypatch):
    sample_trial(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["view", "demo/shwon"]) == 2
    assert "is not the folder of a trial: did you mean demo/shown?" in capsys.readouterr().err


def test_folder_must_be_a_trial(tmp_path, capsys):
    assert main(["view", str(tmp_path)]) == 2
    assert "is not the folder of a trial" in capsys.readouterr().err


def test_ended_trial_has_no_manager(tmp_path):
    """It is not asked for: opening the name store of an ended trial would write into its folder."""
    paths = sample_trial(tmp_path)
    status = ManagerStatus(read_config(paths.config), paths)
    before = sorted(paths.root.rglob("*"))
    assert asyncio.run(status.read()) is None and not status.is_running()
    status.close()
    assert sorted(paths.root.rglob("*")) == before

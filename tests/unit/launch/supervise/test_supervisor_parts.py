"""Decisions of the supervisor: restarts, the first failure, bounded logs, machines, requests to stop."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.cluster.aio import full_disk
from realsys.cluster.children.child_process import HEALTHY_AFTER_S
from realsys.cluster.process import ErrorRecord
from realsys.errors import ConfigError, WaitTimeout
from realsys.launch.nodes.orders import ProcessId, SupervisedNode
from realsys.launch.supervise import stop_request
from realsys.launch.supervise.failures import (
    before,
    defect_of,
    ending,
    first_failure,
    keep_bounded,
    last_error,
    last_words,
    log_since,
    no_room,
    shorten,
    tail,
)
from realsys.launch.supervise.restart_policy import (
    NO_CHECKPOINT,
    Cause,
    Death,
    EndDecision,
    Failure,
    GiveUp,
    Restart,
    RestartPolicy,
    TrialOutcome,
    is_spare,
)
from realsys.launch.supervise.stop_request import ask_to_stop, take_request, watch_requests
from realsys.launch.supervise.supervisor import Bounds, Hooks, Supervisor
from tests.support.processes.supervised import FOREVER, Trial

KEY_ERROR = ("KeyError", "/mine/loss.py:7")


def failure(pid, *, checkpoint=NO_CHECKPOINT, ran_s=1.0, who="trainer", permanent=False, defect=(), spare=False):
    process = ProcessId("host", pid)
    death = Death(f"model_worker/{pid}", process, 1, float(pid), Path("/nowhere.log"))
    cause = Cause(death.name, process, death.time, death.how, "", death.log, defect=defect)
    return Failure(who, [death], frozenset({process}), ran_s, cause, permanent, checkpoint, spare)


def numbers(policy, failures):
    """Which restart in a row each failure gets, None for the end."""
    decisions = [policy.decide(each) for each in failures]
    return [decision.number if isinstance(decision, Restart) else None for decision in decisions]


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([0, 0, 0], [1, 2, None]),
        ([0, 20, 40, 60], [1, 1, 1, 1]),
        # The newest one is damaged and set aside: training restarts from an older one, again and again.
        ([40, 20, 20], [1, 2, None]),
        ([40, 20, 0], [1, 2, None]),
        # It is written once more, and damaged once more.
        ([40, 20, 40, 20, 40], [1, 2, None, None, None]),
        ([40, 20, 60], [1, 2, 1]),
        ([NO_CHECKPOINT, NO_CHECKPOINT, 0], [1, 2, 1]),
        ([20, NO_CHECKPOINT, NO_CHECKPOINT], [1, 2, None]),
    ],
)
def test_only_a_newer_checkpoint_gives_budget_back(checkpoints, expected):
    failures = [failure(pid, checkpoint=step) for pid, step in enumerate(checkpoints, 1)]
    assert numbers(RestartPolicy(2, 0.5), failures) == expected


def test_running_for_long_gives_budget_back():
    long = HEALTHY_AFTER_S + 1
    failures = [failure(1, checkpoint=40), failure(2, checkpoint=20, ran_s=long), failure(3, checkpoint=40), failure(4)]
    assert numbers(RestartPolicy(2, 0.5), failures) == [1, 1, 2, None]


def test_each_worker_has_its_own_budget():
    policy = RestartPolicy(1, 0.5)
    assert numbers(policy, [failure(1, who="a"), failure(2, who="b"), failure(3, who="a")]) == [1, 1, None]


def test_permanent_failure_ends_the_run():
    decision = RestartPolicy(5, 0.5).decide(failure(1, permanent=True))
    assert isinstance(decision, EndDecision) and decision.reason == "model_worker/1 exited with code 1"


def test_deaths_of_a_spent_row_are_causes():
    policy = RestartPolicy(1, 0.5)
    policy.decide(failure(1, checkpoint=0))
    policy.decide(failure(2, checkpoint=20))
    assert {process.pid for process in policy.recovered} == {1, 2}
    end = policy.decide(failure(3, checkpoint=20))
    assert isinstance(end, EndDecision) and [death.process.pid for death in end.deaths] == [2, 3]
    assert end.reason == "model_worker/3 exited with code 1, after 1 restarts (cluster.max_restarts)"
    assert {process.pid for process in policy.recovered} == {1}


def test_same_defect_twice_in_a_row_ends_run():
    policy = RestartPolicy(5, 0.5)
    assert isinstance(policy.decide(failure(1, defect=KEY_ERROR)), Restart)
    end = policy.decide(failure(2, defect=KEY_ERROR))
    assert isinstance(end, EndDecision)
    assert end.reason == (
        "model_worker/2 exited with code 1, twice in a row with the same exception at /mine/loss.py:7"
    )


@pytest.mark.parametrize("between", [failure(2), failure(2, defect=("KeyError", "/mine/loss.py:8"))])
def test_other_failure_in_between_allows_a_restart(between):
    failures = [failure(1, defect=KEY_ERROR), between, failure(3, defect=KEY_ERROR)]
    assert numbers(RestartPolicy(5, 0.5), failures) == [1, 2, 3]


def test_progress_in_between_allows_a_restart():
    """Each start got further than the one before: a restart helps."""
    failures = [failure(pid, defect=KEY_ERROR, checkpoint=step) for pid, step in ((1, 0), (2, 20), (3, 40))]
    assert numbers(RestartPolicy(5, 0.5), failures) == [1, 1, 1]


@pytest.mark.parametrize("defect", [(), KEY_ERROR])
def test_spare_worker_is_given_up(defect):
    policy = RestartPolicy(1, 0.5)
    policy.decide(failure(1, spare=True, defect=defect))
    assert isinstance(policy.decide(failure(2, spare=True, defect=defect)), GiveUp)
    assert {process.pid for process in policy.recovered} == {1, 2}, "no cause of a later end"
    assert isinstance(policy.decide(failure(3, spare=True, permanent=True)), EndDecision)


@pytest.mark.parametrize(
    ("others_s", "min_share", "expected"),
    [
        ([300.0] * 63, 0.0, True),
        ([300.0], 0.0, True),
        ([], 0.0, False),
        ([39.0, 41.0, 70.0], 0.0, False),  # they die as often
        ([300.0] * 31, 0.5, False),
        ([300.0] * 32, 0.5, True),
    ],
)
def test_worker_is_spare_beside_steady_ones(others_s, min_share, expected):
    assert is_spare(40.0, others_s, 64, min_share) == expected


# ---- The first failure, and the error in its log


def record(when, kind, index, pid, message):
    return ErrorRecord(when, kind, index, pid, "host", "ValueError", message, "")


def death(pid, when, name="model_worker/0", code=1):
    return Death(name, ProcessId("host", pid), code, when, Path("/nowhere.log"))


def test_first_failure_is_the_earliest_error(tmp_path):
    (tmp_path / "model_worker-1.log").write_text("".join(f"line {i}\n" for i in range(40)))
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0)])
    errors = [record(4.5, "model_worker", 0, 10, "lost its peer"), record(4.0, "model_worker", 1, 11, "the cause")]
    failure = first_failure(outcome, errors, tmp_path)
    assert failure.process == "model_worker/1" and "the cause" in failure.problem
    assert failure.log_tail[-1] == "line 39" and len(failure.log_tail) == 15


def test_first_failure_is_not_a_recovered_one():
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0)], recovered=frozenset({ProcessId("host", 7)}))
    failure = first_failure(outcome, [record(1.0, "rollout_worker", 0, 7, "long ago")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_earlier_death_without_error_file_counts():
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0, code=-9)])
    failure = first_failure(outcome, [record(6.0, "master_worker", 0, 12, "connection lost")], Path("/nowhere"))
    assert failure.problem == "was killed by SIGKILL (out of memory?)"


def test_kill_counts_before_the_complaint_of_a_peer():
    outcome = TrialOutcome("failed", "", deaths=[death(11, 4.9, "model_worker/1", code=1), death(10, 5.0, code=-9)])
    errors = [record(4.8, "model_worker", 1, 11, "connection closed by peer")]
    failure = first_failure(outcome, errors, Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0" and "SIGKILL" in failure.problem


def test_error_long_before_a_kill_is_the_cause():
    outcome = TrialOutcome("failed", "", deaths=[death(11, 60.0, code=-9, name="model_worker/1")])
    failure = first_failure(outcome, [record(4.8, "model_worker", 0, 10, "the cause")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_error_of_same_pid_elsewhere_is_another_failure():
    """Two hosts of a trial use one pid."""
    foreign = ErrorRecord(6.0, "rollout_worker", 3, 10, "elsewhere", "DataError", "bad", "", 2)
    failure = first_failure(TrialOutcome("failed", "", deaths=[death(10, 5.0, code=3)]), [foreign], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0" and failure.exit_code == 1


def test_tail_of_a_log_that_is_not_text(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100_000 + b"\nlast\n")
    assert tail(log, 1) == ["last"]
    assert tail(tmp_path / "none", 3) == []


# ---- the log, if there is no error file

FRAME = '  File "/mine/loss.py", line 7, in loss\n    batch["x"]\n'
TRACEBACK = f"Traceback (most recent call last):\n{FRAME}KeyError: 'x'\n"
HEAD = "2026-01-02 03:04:05.678 model_worker/0"
FULL = f"{HEAD} ERROR realsys.cluster.worker: cannot write the error file in /t: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ("", ""),
        ("all is well\n", ""),
        (f"{HEAD} ERROR realsys.x: it broke\nmore\n", "it broke"),
        (TRACEBACK, "KeyError: 'x'"),
        (f"{TRACEBACK}{HEAD} ERROR realsys.x: later\n", "KeyError: 'x'"),
        (TRACEBACK + FULL, "cannot write the error file in /t: [Errno 28] No space left on device"),
        (TRACEBACK.replace("KeyError: 'x'", "OSError: [Errno 28] No space left on device") + FULL, None),
    ],
)
def test_last_error_of_a_log(log, problem):
    found, _ = last_error(log)
    if problem is None:
        assert "No space left on device" in found
    else:
        assert found == problem


def test_full_disk_is_named_without_error_files(tmp_path):
    """The error file could not be written on the full disk; the log says why the process ended."""
    problem, defect = last_error(TRACEBACK + FULL)
    assert defect == (), "a restart may find room"
    log = tmp_path / "x.log"
    log.write_text(TRACEBACK + FULL)
    ended = Death("master_worker/0", ProcessId("host", 10), 1, 5.0, log, problem)
    failure = first_failure(TrialOutcome("failed", "", deaths=[ended]), [], tmp_path)
    assert failure is not None and failure.log_tail == []
    assert failure.problem.startswith("exited with code 1: cannot write the error file")
    assert "No space left on device" in failure.problem


def test_defect_is_type_and_stack():
    assert defect_of("KeyError", TRACEBACK) == ("KeyError", "/mine/loss.py:7") == last_error(TRACEBACK)[1]
    assert defect_of("KeyError", TRACEBACK.replace("line 7", "line 8")) != defect_of("KeyError", TRACEBACK)
    assert defect_of("KeyError", "") == ()
    assert defect_of("OSError", TRACEBACK + "OSError: [Errno 28] No space left on device: 'x'") == ()


@pytest.mark.parametrize("kind", ["Fenced", "WaitTimeout", "torch.OutOfMemoryError", "ConnectionResetError"])
def test_exception_from_outside_is_no_defect(kind):
    """Its cause may be gone at the next start."""
    assert defect_of(kind, TRACEBACK) == ()


def test_log_of_an_earlier_start_does_not_count(tmp_path):
    log = tmp_path / "x.log"
    log.write_text(TRACEBACK)
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("second start\n")
    assert log_since(log, start) == "second start\n"
    log.write_text("emptied\n")
    assert log_since(log, start) == "emptied\n"
    assert log_since(tmp_path / "none", 0) == ""


def test_disk_counts_as_full_below_its_margin(tmp_path, monkeypatch):
    assert full_disk(tmp_path) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    assert full_disk(tmp_path) == f"No space left on device: {tmp_path}: free space on this disk"


def test_room_for_a_step_is_asked_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    assert no_room(tmp_path, 3 << 20) == ""
    assert no_room(tmp_path, 4 << 20) == (
        f"No space left on device: a step needs about 4.0 MiB, {tmp_path} has 3.0 MiB"
    )


# ---- The logs of processes: bounded, while whoever writes goes on, and with the last and the first words still there


INNER = "import sys\nfor line in sys.stdin: print('inner', line.strip(), flush=True)"
OUTER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {INNER!r}], stdin=subprocess.PIPE, text=True)
for line in sys.stdin:
    print("outer", line.strip(), file=sys.stderr, flush=True)
    child.stdin.write(line)
    child.stdin.flush()
child.stdin.close()
child.wait()
"""


def test_log_within_its_bound_stays_unchanged(tmp_path):
    log = tmp_path / "x.log"
    shorten(log, 10)
    assert not log.exists()
    log.write_bytes(b"0123456789")
    shorten(log, 10)
    assert log.read_bytes() == b"0123456789" and not before(log).exists()


@pytest.mark.processes
def test_no_line_of_two_writers_is_lost(tmp_path):
    """The second one got the open file from the first, as an engine gets it from its worker."""
    log = tmp_path / "x.log"
    seen: list[str] = []
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", OUTER], stdin=subprocess.PIPE, stdout=file, stderr=file, text=True
        )
    with process:
        for number in range(3):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            while log.read_text().count("\n") < 2:  # both have written
                assert process.poll() is None
            shorten(log, 1)
            seen += before(log).read_text().splitlines()
            assert log.stat().st_size == 0
        process.stdin.write("3\n")
        process.stdin.close()
    seen += log.read_text().splitlines()
    assert sorted(seen) == sorted(f"{who} {number}" for who in ("inner", "outer") for number in range(4))
    assert b"\0" not in log.read_bytes(), "written at the beginning, not where the file had ended"


def test_last_lines_are_found_after_emptying(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    shorten(log, 10)
    assert tail(log, 2) == ["line 98", "line 99"]
    with log.open("a") as file:
        file.write("the end\n")
    assert tail(log, 2) == ["line 99", "the end"] and ending(log, 12) == b"e 99\nthe end\n"[-12:]
    assert ending(tmp_path / "none.log", 10) == b""


def test_logs_never_exceed_two_files_for_long(tmp_path):
    log = tmp_path / "x.log"
    for number in range(100):
        with log.open("a") as file:
            file.write(f"line {number:03d}\n" * 10)
        shorten(log, 500)
        assert log.stat().st_size <= 500 and (not before(log).exists() or before(log).stat().st_size <= 600)
    assert tail(log, 1) == ["line 099"]


def test_logs_are_bounded_although_one_cannot_be(tmp_path):
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    for log in (bad, good):
        log.write_bytes(b"x" * 100)
    before(bad).mkdir()

    async def body():
        task = asyncio.create_task(keep_bounded({bad: 10, good: 10}))
        async with asyncio.timeout(30):
            while not before(good).exists() or good.stat().st_size:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert bad.stat().st_size == 100 and before(good).read_bytes() == b"x" * 100


@pytest.mark.processes
def test_last_words_of_the_first_death_are_kept(tmp_path):
    trial, marker = Trial(tmp_path), tmp_path / "marker"
    script = f"import os, sys; print('again' if os.path.exists({str(marker)!r}) else 'the cause'); "
    script += f"open({str(marker)!r}, 'w').close(); sys.exit(3)"
    outcome = trial.run(trial.spec("rollout_worker", 0, script), trial.spec("master_worker", 0, FOREVER))
    assert len(outcome.restarted) == 2
    log = tmp_path / "rollout_worker-0.log"
    assert last_words(log).read_text() == "the cause\n"
    assert log.read_text() == "the cause\nagain\nagain\n"
    assert not last_words(tmp_path / "master_worker-0.log").exists(), "it was not restarted"


# ---- The wait of the supervisor for the machines of a run


class Machine(SupervisedNode):
    """A node whose wait ends with ``error``."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    async def ready(self, timeout_s):
        if self._error is not None:
            raise self._error

    def start(self, order, on_exit):
        raise AssertionError("nothing may be started before all machines are there")

    async def end(self, timeout_s):
        return []


def start(**errors):
    """Return the end of a run on one node for each name."""
    nodes = {name: Machine(error) for name, error in errors.items()}

    async def body():
        return await Supervisor([], Bounds(1.0, 1.0, 2, join_s=20.0), Hooks(say=lambda *_: None), nodes).run()

    return asyncio.run(body())


LATE = WaitTimeout("late")


def test_missing_nodes_are_listed():
    """Another start may have better machines: a job is queued again."""
    outcome = start(node0=None, node1=LATE, node2=None, node3=LATE)
    assert outcome.status == "failed" and outcome.no_machine
    assert outcome.reason.startswith("the start: no agent for nodes node1, node3 joined within 20 s")


def test_start_without_any_machine_is_final():
    """It would fail again: the agents cannot be started, or cannot see the folder."""
    outcome = start(node0=LATE, node1=LATE)
    assert outcome.status == "failed" and not outcome.no_machine
    assert "no agent for nodes node0, node1 joined" in outcome.reason


def test_refused_machine_counts_more_than_a_late_one():
    outcome = start(node0=LATE, node1=ConfigError("cluster.nodes", 2, "8 GPUs are needed"), node2=None)
    assert isinstance(outcome.refused, ConfigError) and not outcome.no_machine


# ---- The file with which `realsys stop` asks a launcher to stop


def test_request_is_taken_once(tmp_path):
    ask_to_stop(tmp_path / "stop")
    assert "@" in take_request(tmp_path / "stop")
    assert take_request(tmp_path / "stop") == "" and not list(tmp_path.iterdir())


def test_launcher_hears_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_request, "_LOOK_S", 0.01)

    async def body():
        heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(watch_requests(tmp_path / "stop", heard.set_result))
        ask_to_stop(tmp_path / "stop")
        try:
            return await asyncio.wait_for(heard, 60)
        finally:
            watching.cancel()

    assert "@" in asyncio.run(body())


def test_room_is_asked_of_every_disk(tmp_path, monkeypatch):
    full = tmp_path / "shm"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0 if folder == full else 5 << 20))
    assert no_room(tmp_path, 4 << 20, [tmp_path]) == ""
    assert no_room(tmp_path, 4 << 20, [tmp_path, full]).startswith(f"No space left on device: {full}: free space")

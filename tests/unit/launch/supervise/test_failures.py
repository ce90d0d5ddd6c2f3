"""The first failure, and the error in its log."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from realsys.cluster.aio import full_disk
from realsys.cluster.process import ErrorRecord
from realsys.launch.nodes.orders import ProcessId
from realsys.launch.supervise.failures import defect_of, first_failure, last_error, log_since, no_room, tail
from realsys.launch.supervise.restart_policy import Death, TrialOutcome


def record(when: float, kind: str, index: int, pid: int, message: str) -> ErrorRecord:
    return ErrorRecord(when, kind, index, pid, "host", "ValueError", message, "")


def death(pid: int, when: float, name: str = "model_worker/0", code: int = 1) -> Death:
    return Death(name, ProcessId("host", pid), code, when, Path("/nowhere.log"))


def test_first_failure_is_the_earliest_error(tmp_path: Path) -> None:
    (tmp_path / "model_worker-1.log").write_text("".join(f"line {i}\n" for i in range(40)))
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0)])
    errors = [record(4.5, "model_worker", 0, 10, "lost its peer"), record(4.0, "model_worker", 1, 11, "the cause")]
    failure = first_failure(outcome, errors, tmp_path)
    assert failure is not None
    assert failure.process == "model_worker/1" and "the cause" in failure.problem
    assert failure.log_tail[-1] == "line 39" and len(failure.log_tail) == 15


def test_first_failure_is_not_a_recovered_one() -> None:
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0)], recovered=frozenset({ProcessId("host", 7)}))
    failure = first_failure(outcome, [record(1.0, "rollout_worker", 0, 7, "long ago")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_earlier_death_without_error_file_counts() -> None:
    outcome = TrialOutcome("failed", "", deaths=[death(10, 5.0, code=-9)])
    failure = first_failure(outcome, [record(6.0, "master_worker", 0, 12, "connection lost")], Path("/nowhere"))
    assert failure is not None
    assert failure.problem == "was killed by SIGKILL (out of memory?)"


def test_kill_counts_before_the_complaint_of_a_peer() -> None:
    outcome = TrialOutcome("failed", "", deaths=[death(11, 4.9, "model_worker/1", code=1), death(10, 5.0, code=-9)])
    errors = [record(4.8, "model_worker", 1, 11, "connection closed by peer")]
    failure = first_failure(outcome, errors, Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0" and "SIGKILL" in failure.problem


def test_error_long_before_a_kill_is_the_cause() -> None:
    outcome = TrialOutcome("failed", "", deaths=[death(11, 60.0, code=-9, name="model_worker/1")])
    failure = first_failure(outcome, [record(4.8, "model_worker", 0, 10, "the cause")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_error_of_same_pid_elsewhere_is_another_failure() -> None:
    """Two hosts of a trial use one pid."""
    foreign = ErrorRecord(6.0, "rollout_worker", 3, 10, "elsewhere", "DataError", "bad", "", 2)
    failure = first_failure(TrialOutcome("failed", "", deaths=[death(10, 5.0, code=3)]), [foreign], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0" and failure.exit_code == 1


def test_tail_of_a_log_that_is_not_text(tmp_path: Path) -> None:
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
def test_last_error_of_a_log(log: str, problem: str | None) -> None:
    found, _ = last_error(log)
    if problem is None:
        assert "No space left on device" in found
    else:
        assert found == problem


def test_full_disk_is_named_without_error_files(tmp_path: Path) -> None:
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


def test_defect_is_type_and_stack() -> None:
    assert defect_of("KeyError", TRACEBACK) == ("KeyError", "/mine/loss.py:7") == last_error(TRACEBACK)[1]
    assert defect_of("KeyError", TRACEBACK.replace("line 7", "line 8")) != defect_of("KeyError", TRACEBACK)
    assert defect_of("KeyError", "") == ()
    assert defect_of("OSError", TRACEBACK + "OSError: [Errno 28] No space left on device: 'x'") == ()


@pytest.mark.parametrize("kind", ["Fenced", "WaitTimeout", "torch.OutOfMemoryError", "ConnectionResetError"])
def test_exception_from_outside_is_no_defect(kind: str) -> None:
    """Its cause may be gone at the next start."""
    assert defect_of(kind, TRACEBACK) == ()


def test_log_of_an_earlier_start_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(TRACEBACK)
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("second start\n")
    assert log_since(log, start) == "second start\n"
    log.write_text("emptied\n")
    assert log_since(log, start) == "emptied\n"
    assert log_since(tmp_path / "none", 0) == ""


def test_disk_counts_as_full_below_its_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert full_disk(tmp_path) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    assert full_disk(tmp_path) == f"No space left on device: {tmp_path}: free space on this disk"


def test_room_for_a_step_is_asked_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    assert no_room(tmp_path, 3 << 20) == ""
    assert no_room(tmp_path, 4 << 20) == (
        f"No space left on device: a step needs about 4.0 MiB, {tmp_path} has 3.0 MiB"
    )

"""Which failure came first, and what its log says."""

from __future__ import annotations

from pathlib import Path

from realsys.launch.processes.failures import first_failure, tail
from realsys.launch.processes.verdict import Death, Outcome


class Error:
    def __init__(self, when: float, kind: str, index: int, pid: int, message: str) -> None:
        self.time, self.kind, self.index, self.pid, self.message = when, kind, index, pid, message
        self.type, self.exit_code = "ValueError", 1


def death(pid: int, when: float, name: str = "model_worker/0", code: int = 1) -> Death:
    return Death(name, pid, code, when, Path("/nowhere.log"))


def test_first_failure_is_the_earliest_error_not_the_first_death_seen(tmp_path: Path) -> None:
    (tmp_path / "model_worker-1.log").write_text("".join(f"line {i}\n" for i in range(40)))
    outcome = Outcome("failed", "", deaths=[death(10, 5.0)])
    errors = [Error(4.5, "model_worker", 0, 10, "lost its peer"), Error(4.0, "model_worker", 1, 11, "the cause")]
    failure = first_failure(outcome, errors, tmp_path)
    assert failure is not None
    assert failure.process == "model_worker/1" and "the cause" in failure.problem
    assert failure.log_tail[-1] == "line 39" and len(failure.log_tail) == 15


def test_first_failure_is_not_one_that_a_restart_made_good() -> None:
    outcome = Outcome("failed", "", deaths=[death(10, 5.0)], mended=frozenset({7}))
    failure = first_failure(outcome, [Error(1.0, "rollout_worker", 0, 7, "long ago")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_death_without_an_error_file_counts_when_it_came_first() -> None:
    outcome = Outcome("failed", "", deaths=[death(10, 5.0, code=-9)])
    failure = first_failure(outcome, [Error(6.0, "master_worker", 0, 12, "connection lost")], Path("/nowhere"))
    assert failure is not None
    assert failure.problem == "was killed by SIGKILL (out of memory?)"


def test_kill_counts_before_the_complaint_of_a_peer_that_was_quicker() -> None:
    outcome = Outcome("failed", "", deaths=[death(11, 4.9, "model_worker/1", code=1), death(10, 5.0, code=-9)])
    errors = [Error(4.8, "model_worker", 1, 11, "connection closed by peer")]
    failure = first_failure(outcome, errors, Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0" and "SIGKILL" in failure.problem


def test_error_long_before_a_kill_is_the_cause() -> None:
    outcome = Outcome("failed", "", deaths=[death(11, 60.0, code=-9, name="model_worker/1")])
    failure = first_failure(outcome, [Error(4.8, "model_worker", 0, 10, "the cause")], Path("/nowhere"))
    assert failure is not None and failure.process == "model_worker/0"


def test_tail_of_a_log_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100_000 + b"\nlast\n")
    assert tail(log, 1) == ["last"]
    assert tail(tmp_path / "none", 3) == []

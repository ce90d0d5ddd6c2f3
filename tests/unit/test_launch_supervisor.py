"""The supervisor with real child processes: small Python scripts that say over a socket when they are ready."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from launch.failures import first_failure, tail
from launch.plan import STATELESS, Kind, ProcessSpec
from launch.supervisor import Death, Outcome, Supervisor

READY = """
import os, signal, socket, sys
def ready():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + sys.argv[1])
        s.sendall(sys.argv[2].encode())
"""
FOREVER = READY + "ready(); signal.pause()"
STUBBORN = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nwhile True: signal.pause()"


class Trial:
    """Specs over scripts, and the socket on which they report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.socket = f"realsys-test-{uuid.uuid4().hex}"  # abstract: no file, no limit on the folder's length

    def spec(self, kind: Kind, index: int, script: str) -> ProcessSpec:
        argv = (sys.executable, "-c", script, self.socket, f"{kind}/{index}")
        return ProcessSpec(kind, index, argv, self.folder / f"{kind}-{index}.log", kind in STATELESS, {})

    def run(
        self,
        *specs: ProcessSpec,
        until: Sequence[str] = (),
        then: Callable[[Supervisor], None] | None = None,
        stop_timeout_s: float = 5.0,
        hopeless: Callable[[Death], bool] = lambda death: False,
    ) -> Outcome:
        """Run to the end; once every process in ``until`` is ready, call ``then``. Checks that no process is left."""

        async def body() -> Outcome:
            waiting, all_ready = set(until), asyncio.Event()

            async def on_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                waiting.discard((await reader.read()).decode())
                writer.close()
                if not waiting:
                    all_ready.set()

            async with asyncio.timeout(30), await asyncio.start_unix_server(on_ready, "\0" + self.socket):
                supervisor = Supervisor(
                    specs,
                    stop_timeout_s=stop_timeout_s,
                    max_restarts=2,
                    say=self.notes.append,
                    hopeless=hopeless,
                    first_backoff_s=0.01,
                )
                running = asyncio.create_task(supervisor.run())
                if then is not None:
                    await all_ready.wait()
                    then(supervisor)
                return await running

        before = {p.pid for p in psutil.Process().children(recursive=True)}
        outcome = asyncio.run(body())
        assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
        return outcome


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def stop(supervisor: Supervisor) -> None:
    supervisor.interrupt(signal.SIGINT)


def test_run_is_done_when_the_master_exits_zero(trial: Trial) -> None:
    others = [trial.spec("model_worker", 0, FOREVER), trial.spec("rollout_worker", 0, FOREVER)]
    master = READY + "ready(); signal.sigwait({signal.SIGUSR1})"
    master = master.replace("import os", "import signal; signal.pthread_sigmask(0, {signal.SIGUSR1})\nimport os", 1)
    outcome = trial.run(
        *others,
        trial.spec("master_worker", 0, master),
        until=["model_worker/0", "rollout_worker/0", "master_worker/0"],
        then=lambda s: os.kill(s.running()["master_worker/0"], signal.SIGUSR1),
    )
    assert outcome.status == "done"
    assert not outcome.deaths and not outcome.killed


@pytest.mark.parametrize(
    ("kind", "script", "how"),
    [
        ("model_worker", "raise SystemExit(3)", "exited with code 3"),
        ("model_worker", "raise SystemExit(0)", "exited with code 0"),
        ("master_worker", "raise SystemExit(1)", "exited with code 1"),
        ("model_worker", "import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_death_of_the_training_side_ends_the_run(trial: Trial, kind: Kind, script: str, how: str) -> None:
    outcome = trial.run(trial.spec("rollout_worker", 0, FOREVER), trial.spec(kind, 0, script))
    assert outcome.status == "failed"
    assert how in outcome.reason and f"{kind}/0" in outcome.reason
    assert [death.name for death in outcome.deaths] == [f"{kind}/0"]


def test_stateless_worker_is_restarted_until_its_budget_is_spent(trial: Trial) -> None:
    crash = "print('hello'); raise SystemExit(4)"
    outcome = trial.run(trial.spec("master_worker", 0, FOREVER), trial.spec("rollout_worker", 0, crash))
    assert outcome.status == "failed"
    assert "rollout_worker/0 exited with code 4, after 2 restarts (cluster.max_restarts)" in outcome.reason
    assert len(outcome.restarted) == 2 and len(trial.notes) == 2
    assert (trial.folder / "rollout_worker-0.log").read_text().count("hello") == 3


def test_worker_that_met_bad_input_is_not_restarted(trial: Trial) -> None:
    specs = [trial.spec("generation_server", 0, "raise SystemExit(1)"), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, hopeless=lambda death: death.name == "generation_server/0")
    assert outcome.status == "failed" and not outcome.restarted
    assert outcome.reason == "generation_server/0 exited with code 1"


def test_restarted_worker_that_recovers_does_not_end_the_run(trial: Trial) -> None:
    once = READY + "path = sys.argv[1] + '.again'\n"
    once += f"os.chdir({str(trial.folder)!r})\n"
    once += "if not os.path.exists(path): open(path, 'w').close(); sys.exit(1)\nready(); signal.pause()"
    outcome = trial.run(
        trial.spec("generation_server", 0, once),
        trial.spec("master_worker", 0, FOREVER),
        until=["generation_server/0", "master_worker/0"],
        then=stop,
    )
    assert outcome.status == "interrupted"
    assert [death.name for death in outcome.restarted] == ["generation_server/0"]
    assert not outcome.deaths


def test_child_that_ignores_sigterm_is_killed_after_the_bound(trial: Trial) -> None:
    began = time.monotonic()
    outcome = trial.run(
        trial.spec("model_worker", 0, STUBBORN),
        trial.spec("rollout_worker", 0, FOREVER),
        until=["model_worker/0", "rollout_worker/0"],
        then=stop,
        stop_timeout_s=0.5,
    )
    assert outcome.killed == ["model_worker/0"]
    assert outcome.signal == signal.SIGINT
    assert time.monotonic() - began < 10  # the promise for a whole run
    assert any("model_worker/0" in note for note in trial.notes)


def test_second_signal_does_not_wait_for_an_orderly_stop(trial: Trial) -> None:
    outcome = trial.run(
        trial.spec("model_worker", 0, STUBBORN),
        until=["model_worker/0"],
        then=lambda s: (stop(s), stop(s))[0],
        stop_timeout_s=600,
    )
    assert outcome.killed == ["model_worker/0"]


def test_grandchild_in_a_session_of_its_own_does_not_outlive_the_run(trial: Trial) -> None:
    """What SGLang or a double fork does: neither the group's SIGKILL nor the parent's death reaches it."""
    marker = trial.folder / "grandchild.pid"
    child = READY + "import subprocess\n"
    child += "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
    child += f"open({str(marker)!r}, 'w').write(str(p.pid)); ready(); signal.pause()"
    outcome = trial.run(trial.spec("generation_server", 0, child), until=["generation_server/0"], then=stop)
    assert len(outcome.killed) == 1 and marker.read_text() in outcome.killed[0]
    assert not psutil.pid_exists(int(marker.read_text()))


def test_children_of_a_restarted_worker_do_not_outlive_it(trial: Trial) -> None:
    """A verifier process of a crashed RolloutWorker must be gone before the next one starts."""
    marker = trial.folder / "pids"
    child = READY + "import subprocess\n"
    child += f"old = open({str(marker)!r}).read() if os.path.exists({str(marker)!r}) else ''\n"
    child += "if old: print('alive' if os.path.exists('/proc/' + old + '/exe') else 'gone', flush=True)\n"
    child += "if old: ready(); signal.pause()\n"
    child += "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    child += f"open({str(marker)!r}, 'w').write(str(p.pid)); os._exit(1)"
    trial.run(trial.spec("rollout_worker", 0, child), until=["rollout_worker/0"], then=stop)
    assert (trial.folder / "rollout_worker-0.log").read_text() == "gone\n"


def test_real_signal_reaches_the_supervisor(trial: Trial) -> None:
    outcome = trial.run(
        trial.spec("master_worker", 0, FOREVER),
        until=["master_worker/0"],
        then=lambda _: os.kill(os.getpid(), signal.SIGTERM),
    )
    assert outcome.status == "interrupted" and outcome.signal == signal.SIGTERM


def test_program_that_cannot_be_started_fails_the_run(trial: Trial) -> None:
    spec = ProcessSpec("model_worker", 0, ("/no/such/program",), trial.folder / "x.log", False, {})
    outcome = trial.run(trial.spec("master_worker", 0, FOREVER), spec)
    assert outcome.status == "failed"
    assert "model_worker/0 cannot be started" in outcome.reason


def test_processes_of_others_are_left_alone(trial: Trial) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        outcome = trial.run(trial.spec("model_worker", 0, "raise SystemExit(1)"))
        assert other.poll() is None
        assert not outcome.killed
    finally:
        other.communicate(b"\n")
    assert other.returncode == 0


def test_nothing_is_left_behind_but_the_logs(trial: Trial) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    trial.run(trial.spec("rollout_worker", 0, FOREVER), trial.spec("master_worker", 0, "pass"))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {p.name for p in trial.folder.iterdir()} == {"rollout_worker-0.log", "master_worker-0.log"}


# ---- which failure came first


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
    outcome = Outcome("failed", "", deaths=[death(10, 5.0)], restarted=[death(7, 1.0, "rollout_worker/0")])
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

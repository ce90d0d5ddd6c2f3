"""The supervisor with real child processes: small Python scripts that say over a socket when they are ready."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from launch.failures import first_failure, tail
from launch.plan import TRAINING, Kind, OnDeath, ProcessSpec
from launch.supervisor import Supervisor
from launch.verdict import Death, Outcome
from realsys.errors import WaitTimeout

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
        self.recover = False
        self.notes: list[str] = []
        self.socket = f"realsys-test-{uuid.uuid4().hex}"  # abstract: no file, no limit on the folder's length

    def spec(self, kind: Kind, index: int, script: str) -> ProcessSpec:
        argv = (sys.executable, "-c", script, self.socket, f"{kind}/{index}")
        on_death: OnDeath = "restart" if kind not in TRAINING else "restart_training" if self.recover else "end"
        return ProcessSpec(kind, index, argv, self.folder / f"{kind}-{index}.log", on_death)

    def run(
        self,
        *specs: ProcessSpec,
        until: Sequence[str] = (),
        then: Callable[[Supervisor], None] | None = None,
        stop_timeout_s: float = 5.0,
        permanent: Callable[[frozenset[int]], bool] = lambda pids: False,
        checkpoint: Callable[[], int | None] = lambda: None,
        name_store_ready: Callable[[ProcessSpec], Awaitable[None]] | None = None,
    ) -> Outcome:
        """Run to the end; once every process in ``until`` is ready, call ``then``. Checks that no process is left."""

        async def body() -> Outcome:
            waiting, all_ready = set(until), asyncio.Event()

            def on_ready() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(10)
                    waiting.discard(connection.recv(100).decode())
                if not waiting:
                    all_ready.set()

            asyncio.get_running_loop().add_reader(server, on_ready)
            async with asyncio.timeout(90):
                supervisor = Supervisor(
                    specs,
                    stop_timeout_s=stop_timeout_s,
                    master_stop_s=stop_timeout_s / 2,
                    max_restarts=2,
                    say=self.notes.append,
                    permanent=permanent,
                    checkpoint=checkpoint,
                    first_backoff_s=0.01,
                    **({"name_store_ready": name_store_ready} if name_store_ready else {}),
                )
                running = asyncio.create_task(supervisor.run())
                if then is not None:
                    await all_ready.wait()
                    then(supervisor)
                return await running

        before = {p.pid for p in psutil.Process().children(recursive=True)}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("\0" + self.socket)
            server.listen()
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
def test_death_of_the_training_side_ends_a_run_without_recovery(
    trial: Trial, kind: Kind, script: str, how: str
) -> None:
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
    outcome = trial.run(*specs, permanent=lambda pids: True)
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
    spec = ProcessSpec("model_worker", 0, ("/no/such/program",), trial.folder / "x.log", "end")
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


# ---- the training side


def log(trial: Trial, name: str) -> list[str]:
    return (trial.folder / f"{name.replace('/', '-')}.log").read_text().splitlines()


def waits_for(name: str) -> str:
    """A script that is ready, and goes on with what follows at the signal, whenever that comes."""
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.{name}}})\n"
    return READY + block + f"ready(); signal.sigwait({{signal.{name}}})\n"


SHOW = READY + "print(os.environ.get('REALSYS_TRAINING_START'), os.getpid(), flush=True)\n"
SHOWN = SHOW + "ready(); signal.pause()"


def at_second_start(then: str) -> str:
    """Reports only when it has been started a second time; ``then`` is what it does at the first."""
    return SHOW + f"if os.environ['REALSYS_TRAINING_START'] == '1':\n    {then}\nready(); signal.pause()"


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("os._exit(75)", "exited with code 75"),
        ("os._exit(0)", "exited with code 0"),
    ],
)
def test_death_of_a_rank_restarts_the_whole_training_side_and_nothing_else(trial: Trial, victim: str, how: str) -> None:
    trial.recover = True
    # The others ignore SIGTERM, and wait for ever: they have to be killed for the side to come back.
    other = at_second_start("signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")
    outcome = trial.run(
        trial.spec("gserver_manager", 0, SHOWN),
        trial.spec("rollout_worker", 0, SHOWN),
        trial.spec("model_worker", 0, other),
        trial.spec("model_worker", 1, at_second_start(victim)),
        trial.spec("master_worker", 0, other),
        until=["gserver_manager/0", "rollout_worker/0", "model_worker/0", "model_worker/1", "master_worker/0"],
        then=stop,
        checkpoint=lambda: 40,
    )
    assert outcome.status == "interrupted" and not outcome.killed and not outcome.deaths
    assert [death.name for death in outcome.restarted] == ["model_worker/1"]
    [note] = trial.notes
    assert note.startswith(f"model_worker/1 {how}; restart 1/2 of the training side in 0.0 s, from step 40 (")
    for name in ("model_worker/0", "model_worker/1", "master_worker/0"):
        assert log(trial, name)[-1].startswith("2 ")
    for name in ("gserver_manager/0", "rollout_worker/0"):
        assert len(log(trial, name)) == 1 and log(trial, name)[0].startswith("None ")
    assert len(outcome.mended) == 3


def test_training_side_that_dies_again_and_again_ends_with_its_first_death(trial: Trial) -> None:
    trial.recover = True
    dies = "import os; n = int(os.environ['REALSYS_TRAINING_START']); os._exit(10 + n)"
    outcome = trial.run(
        trial.spec("rollout_worker", 0, FOREVER),
        trial.spec("model_worker", 0, dies),
        trial.spec("master_worker", 0, FOREVER),
    )
    assert outcome.status == "failed" and len(outcome.restarted) == 2 and len(trial.notes) == 2
    assert outcome.reason == "model_worker/0 exited with code 13, after 2 restarts (cluster.max_restarts)"
    failure = first_failure(outcome, [], trial.folder)
    assert failure is not None and failure.problem == "exited with code 11"


def test_new_checkpoint_gives_the_training_side_its_budget_back(trial: Trial) -> None:
    trial.recover = True
    dies = "import os; n = int(os.environ['REALSYS_TRAINING_START']); os._exit(10 + n if n < 6 else 0)"
    steps = iter([0, 0, 20, 20, 40, 40])
    outcome = trial.run(trial.spec("master_worker", 0, dies), checkpoint=lambda: next(steps))
    assert outcome.status == "done" and len(outcome.restarted) == 5
    assert [note.split("restart ")[1].split()[0] for note in trial.notes] == ["1/2", "2/2", "1/2", "2/2", "1/2"]


def test_failure_of_a_peer_that_would_come_again_ends_the_run(trial: Trial) -> None:
    """The MasterWorker ends of what a rank told it; that the input is bad, the rank says itself."""
    trial.recover = True
    said, master = trial.folder / "said", trial.folder / "master"
    rank = waits_for("SIGUSR1") + f"open({str(said)!r}, 'w').write(str(os.getpid()))\n"
    rank += f"os.kill(int(open({str(master)!r}).read()), signal.SIGUSR1); os._exit(2)"

    def fail(supervisor: Supervisor) -> None:
        master.write_text(str(supervisor.running()["master_worker/0"]))
        os.kill(supervisor.running()["model_worker/0"], signal.SIGUSR1)

    outcome = trial.run(
        trial.spec("model_worker", 0, rank),
        trial.spec("master_worker", 0, waits_for("SIGUSR1") + "os._exit(1)"),
        until=["model_worker/0", "master_worker/0"],
        then=fail,
        permanent=lambda pids: said.exists() and int(said.read_text()) in pids,
    )
    assert outcome.status == "failed" and not outcome.restarted and not outcome.mended
    assert 2 in {death.returncode for death in outcome.deaths}


def test_signal_while_the_training_side_is_down_ends_the_run(trial: Trial) -> None:
    trial.recover = True
    outcome = trial.run(
        trial.spec("rollout_worker", 0, FOREVER),
        trial.spec("model_worker", 0, STUBBORN),
        trial.spec("master_worker", 0, FOREVER),
        until=["rollout_worker/0", "model_worker/0", "master_worker/0"],
        then=lambda s: (os.kill(s.running()["master_worker/0"], signal.SIGKILL), stop(s))[1],
        stop_timeout_s=1.0,
    )
    assert outcome.status == "interrupted"


# ---- the order of stopping


def test_master_is_stopped_first_and_finds_the_others_alive(trial: Trial) -> None:
    """It takes its last checkpoint with them."""
    asked = trial.folder / "asked"
    rank = waits_for("SIGTERM") + f"open({str(asked)!r}, 'w').close()"
    master = waits_for("SIGTERM") + f"print('asked' if os.path.exists({str(asked)!r}) else 'first')"
    outcome = trial.run(
        trial.spec("model_worker", 0, rank),
        trial.spec("master_worker", 0, master),
        until=["model_worker/0", "master_worker/0"],
        then=stop,
        stop_timeout_s=60.0,
    )
    assert outcome.status == "interrupted" and not outcome.killed
    assert log(trial, "master_worker/0") == ["first"] and asked.exists()


def test_master_that_does_not_stop_leaves_the_others_their_time(trial: Trial) -> None:
    outcome = trial.run(
        trial.spec("model_worker", 0, FOREVER),
        trial.spec("master_worker", 0, STUBBORN),
        until=["model_worker/0", "master_worker/0"],
        then=stop,
        stop_timeout_s=2.0,
    )
    assert outcome.killed == ["master_worker/0"]


def test_name_store_is_waited_for_at_the_start_and_stopped_last(trial: Trial) -> None:
    order = trial.folder / "order"
    script = READY + f"out = open({str(order)!r}, 'a', buffering=1)\n"
    script += "def ended(*_):\n    out.write('end ' + sys.argv[2] + chr(10)); os._exit(0)\n"
    script += (
        "signal.signal(signal.SIGTERM, ended); out.write('start ' + sys.argv[2] + chr(10)); ready(); signal.pause()"
    )

    async def answers(spec: ProcessSpec) -> None:
        assert spec.name == "name_store/0" and not (trial.folder / "gserver_manager-0.log").exists()
        while not order.exists() or "start name_store/0" not in order.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    trial.run(
        trial.spec("name_store", 0, script),
        trial.spec("gserver_manager", 0, script),
        until=["name_store/0", "gserver_manager/0"],
        then=stop,
        name_store_ready=answers,
    )
    assert order.read_text().splitlines() == [
        "start name_store/0",
        "start gserver_manager/0",
        "end gserver_manager/0",
        "end name_store/0",
    ]


def test_name_store_that_does_not_answer_ends_the_run_by_name(trial: Trial) -> None:
    async def silent(spec: ProcessSpec) -> None:
        raise WaitTimeout("etcd at 127.0.0.1:1 did not answer within 1 s")

    specs = [trial.spec("name_store", 0, FOREVER), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, name_store_ready=silent)
    assert outcome.status == "failed"
    assert outcome.reason == "name_store/0: etcd at 127.0.0.1:1 did not answer within 1 s"
    assert not (trial.folder / "master_worker-0.log").exists()


def test_signal_while_the_name_store_is_waited_for_ends_the_run(trial: Trial) -> None:
    async def interrupted(spec: ProcessSpec) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    outcome = trial.run(trial.spec("name_store", 0, FOREVER), name_store_ready=interrupted)
    assert outcome.status == "interrupted"


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

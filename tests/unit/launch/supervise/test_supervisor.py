"""The supervisor with real child processes, one by one."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest

from realsys.cluster.process import ErrorRecord
from realsys.launch.process_plan import ProcessSpec
from realsys.launch.supervise.supervisor import Supervisor
from tests.support.processes.supervised import FOREVER, READY, STUBBORN, stop, waits_for

pytestmark = pytest.mark.processes


def test_run_is_done_when_the_master_exits_zero(trial):
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
def test_death_of_trainer_ends_run_without_recovery(trial, kind, script, how):
    outcome = trial.run(trial.spec("rollout_worker", 0, FOREVER), trial.spec(kind, 0, script))
    assert outcome.status == "failed"
    assert how in outcome.reason and f"{kind}/0" in outcome.reason
    assert [death.name for death in outcome.deaths] == [f"{kind}/0"]


def test_parts_of_a_server_restart_together(trial):
    """The death of the second part ends the first one: neither can go on alone."""
    paths = READY + f"import pathlib, time; folder = pathlib.Path({str(trial.folder)!r})\n"
    stays = paths + "ready(); (folder / 'first').touch(); signal.pause()"
    first = replace(trial.spec("generation_server", 0, stays), nodes=2)
    crash = paths + "if (folder / 'mark').exists(): ready(); signal.pause()\n"
    crash += "while not (folder / 'first').exists(): time.sleep(0.01)\n"
    crash += "(folder / 'mark').touch(); ready(); raise SystemExit(4)"
    second = replace(trial.spec("generation_server", 0, crash), nodes=2, node_rank=1, log=trial.folder / "part.log")
    pids: list[int] = []

    async def restarted(supervisor):
        pids.append(supervisor.running()["generation_server/0"])
        for _ in range(3):  # the other part, and both parts again
            await trial.ready("generation_server/0")
        pids.append(supervisor.running()["generation_server/0"])
        stop(supervisor)

    master = trial.spec("master_worker", 0, FOREVER)
    outcome = trial.run(first, second, master, until=["generation_server/0"], then=restarted)
    assert pids[0] != pids[1] and [death.name for death in outcome.restarted] == ["generation_server/0.1"]
    assert "generation_server/0.1 exited with code 4; restart 1/2" in trial.notes[0]


def test_stateless_worker_is_restarted_within_its_budget(trial):
    crash = "print('hello'); raise SystemExit(4)"
    outcome = trial.run(trial.spec("master_worker", 0, FOREVER), trial.spec("rollout_worker", 0, crash))
    assert outcome.status == "failed"
    assert "rollout_worker/0 exited with code 4, after 2 restarts (cluster.max_restarts)" in outcome.reason
    assert len(outcome.restarted) == 2 and len(trial.notes) == 2
    assert trial.events[-2:] == [("restart", "rollout_worker/0")] * 2
    assert (trial.folder / "rollout_worker-0.log").read_text().count("hello") == 3


@pytest.mark.parametrize(
    ("kind", "min_share", "status"),
    [
        ("generation_server", 0.5, "done"),
        ("reward_service", 0.5, "done"),
        ("rollout_worker", 0.5, "done"),
        ("rollout_worker", 0.75, "failed"),
    ],
)
def test_run_continues_without_one_bad_worker(trial, kind, min_share, status):
    """It crashes at every start but its first, while the other one runs. Then the master finishes."""
    flag = trial.folder / "started"
    bad = waits_for("SIGUSR1").replace("ready(); ", f"first = not os.path.exists({str(flag)!r}); first and ready();")
    bad = bad.replace("signal.sigwait", f"open({str(flag)!r}, 'w'); first and signal.sigwait") + "raise SystemExit(4)"
    supervisors: list[Supervisor] = []

    def began(supervisor):
        supervisors.append(supervisor)
        good = next(child for child in supervisor._of_kind(kind) if child.spec.name == f"{kind}/0")
        good.process.started -= 3600.0  # it outlives any start of the other one, however slow the machine
        os.kill(supervisor.running()[f"{kind}/1"], signal.SIGUSR1)

    class Notes(list[str]):
        def append(self, note):
            super().append(note)
            if "given up" in note:
                os.kill(supervisors[0].running()["master_worker/0"], signal.SIGUSR1)

    trial.notes = Notes()
    specs = [trial.spec(kind, 0, FOREVER), trial.spec(kind, 1, bad)]
    specs.append(trial.spec("master_worker", 0, waits_for("SIGUSR1")))
    outcome = trial.run(*specs, until=[spec.name for spec in specs], then=began, min_share=min_share)
    assert outcome.status == status, outcome
    assert outcome.given_up == ([f"{kind}/1"] if status == "done" else [])
    for note in ("given up after 2 restarts", "the run continues with 1 of 2"):
        assert (note in trial.notes[-1]) == (status == "done")


BAD_INPUT = "import os; print(os.getpid(), flush=True); raise SystemExit(1)"


def test_worker_with_bad_input_is_not_restarted(trial):
    specs = [trial.spec("generation_server", 0, BAD_INPUT), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, errors=lambda: records_of(trial, exit_code=2))
    assert outcome.status == "failed" and not outcome.restarted
    assert outcome.reason == "generation_server/0 exited with code 1"


def records_of(trial, exit_code):
    """An error file of each process that printed its pid."""
    pids = [int(line) for path in trial.folder.glob("*.log") for line in path.read_text().split() if line.isdigit()]
    return [
        ErrorRecord(1.0, "generation_server", 0, pid, socket.gethostname(), "ModelError", "bad", "", exit_code)
        for pid in pids
    ]


def test_restart_line_carries_the_exception(trial):
    crash = "import sys\nif len(sys.argv) > 2: print('hello')\ndef fail(): {}['x']\nfail()"
    specs = [trial.spec("rollout_worker", 0, crash), trial.spec("master_worker", 0, FOREVER)]
    trial.run(*specs)
    assert trial.notes[0].startswith("rollout_worker/0 exited with code 1: KeyError: 'x'; restart 1/2 in 0.0 s (")


def test_silent_death_names_the_full_disk(trial):
    outcome = trial.run(trial.spec("model_worker", 0, "raise SystemExit(1)"), outside=lambda: "No space left on device")
    assert [death.error for death in outcome.deaths] == ["No space left on device"]


def test_restarts_wait_for_room_on_a_full_disk(trial):
    """While they wait none is spent, neither of the process that found the disk full nor of another one."""
    trial.recover = True
    room = trial.folder / "room"
    asked: list[str] = []

    def no_room():
        if len(asked) == 3:
            room.touch()
        asked.append("no room" * (not room.exists()))
        return asked[-1]

    begins = READY + f"if not os.path.exists({str(room)!r}): raise OSError(28, 'No space left on device')\n"
    worker, master = (
        trial.spec(kind, 0, begins + "ready(); signal.pause()") for kind in ("rollout_worker", "model_worker")
    )
    outcome = trial.run(
        *(worker, master, trial.spec("master_worker", 0, FOREVER)),
        until=["rollout_worker/0", "model_worker/0"],
        then=stop,
        no_room=no_room,
        room_s=3600.0,
    )
    assert outcome.status == "interrupted" and asked.count("no room") == 3
    assert sorted(death.name for death in outcome.restarted) == ["model_worker/0", "rollout_worker/0"]
    assert [note for note in trial.notes if note.startswith("no room")] == [
        "no room: restarts wait up to 3600 s for room"
    ]


def test_disk_that_stays_full_ends_the_run(trial):
    crash = "raise OSError(28, 'No space left on device')"
    specs = [trial.spec("rollout_worker", 0, crash), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, no_room=lambda: "no room", room_s=0.1)
    assert outcome.status == "failed" and outcome.reason == "no room: free space, then run the command again"
    assert len(outcome.restarted) == 1
    assert [(death.name, death.error) for death in outcome.deaths] == [
        ("rollout_worker/0", "OSError: [Errno 28] No space left on device")
    ]


def test_other_failures_do_not_wait_for_room(trial):
    specs = [trial.spec("rollout_worker", 0, "raise SystemExit(4)"), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, no_room=lambda: "no room", room_s=3600.0)
    assert "after 2 restarts" in outcome.reason


def test_child_that_ignores_sigterm_is_killed(trial):
    began: list[float] = []

    def stop_and_note(supervisor):
        began.append(time.monotonic())
        stop(supervisor)

    outcome = trial.run(
        trial.spec("model_worker", 0, STUBBORN),
        trial.spec("rollout_worker", 0, FOREVER),
        until=["model_worker/0", "rollout_worker/0"],
        then=stop_and_note,
        stop_timeout_s=1.5,
    )
    assert outcome.killed == ["model_worker/0"]
    assert outcome.signal == signal.SIGINT
    assert time.monotonic() - began[0] < 10  # the promise for a whole run
    assert any("model_worker/0" in note for note in trial.notes)


def test_second_signal_ends_the_orderly_stop(trial):
    outcome = trial.run(
        trial.spec("model_worker", 0, STUBBORN),
        until=["model_worker/0"],
        then=lambda s: (stop(s), stop(s))[0],
        stop_timeout_s=600,
    )
    assert outcome.killed == ["model_worker/0"]


def test_grandchild_in_own_session_does_not_outlive_run(trial):
    """SGLang or a double fork can do that: neither the group's SIGKILL nor the parent's death reaches it."""
    marker = trial.folder / "grandchild.pid"
    child = READY + "import subprocess\n"
    child += "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True)\n"
    child += f"open({str(marker)!r}, 'w').write(str(p.pid)); ready(); signal.pause()"
    outcome = trial.run(trial.spec("generation_server", 0, child), until=["generation_server/0"], then=stop)
    assert len(outcome.killed) == 1 and marker.read_text() in outcome.killed[0]
    assert not psutil.pid_exists(int(marker.read_text()))


def test_helper_that_ends_after_its_worker_is_not_killed(trial):
    """A resource tracker does that: it ends when the pipe from its process closes, on a busy machine a moment later."""
    helper = "import os, time; os.write(1, b'.'); os.read(0, 1); time.sleep(0.1); os._exit(0)"
    child = READY + "import subprocess\n"
    child += "own = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'start_new_session': True}\n"
    child += f"p = subprocess.Popen([sys.executable, '-c', {helper!r}], **own)\n"
    child += "p.stdout.read(1); ready(); signal.pause()"
    outcome = trial.run(trial.spec("generation_server", 0, child), until=["generation_server/0"], then=stop)
    assert outcome.killed == []


def test_children_die_with_a_restarted_worker(trial):
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


def test_second_sigterm_does_not_hurry_the_stop(trial):
    """A batch system may send it to the same process more than once."""
    slow = READY + "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os._exit(7)))\n"
    slow = "import time\n" + slow + "ready()\nwhile True: signal.pause()"

    def twice(supervisor):
        for _ in range(2):
            supervisor.interrupt(signal.SIGTERM)

    outcome = trial.run(trial.spec("master_worker", 0, slow), until=["master_worker/0"], then=twice)
    assert outcome.status == "interrupted" and outcome.killed == []


def test_ctrl_c_stops_a_background_run(trial):
    """Such a shell has its commands ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome = trial.run(
            trial.spec("master_worker", 0, FOREVER),
            until=["master_worker/0"],
            then=lambda _: os.kill(os.getpid(), signal.SIGINT),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.status == "interrupted" and outcome.signal == signal.SIGINT


def test_ignored_hang_up_stays_ignored(trial):
    """nohup: the terminal goes, the run stays."""

    def hang_up(supervisor):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = trial.run(trial.spec("master_worker", 0, FOREVER), until=["master_worker/0"], then=hang_up)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome.status == "interrupted" and outcome.signal == signal.SIGTERM


def test_program_that_cannot_be_started_fails_the_run(trial):
    spec = ProcessSpec("model_worker", 0, ("/no/such/program",), trial.folder / "x.log", "end")
    outcome = trial.run(trial.spec("master_worker", 0, FOREVER), spec)
    assert outcome.status == "failed"
    assert "model_worker/0 cannot be started" in outcome.reason


@pytest.mark.parametrize("code", [0, 3])
def test_stateless_worker_is_restarted_for_any_exit_code(trial, code):
    once = READY + f"path = {str(trial.folder / 'again')!r}\n"
    once += f"if not os.path.exists(path): open(path, 'w').close(); sys.exit({code})\nready(); signal.pause()"
    outcome = trial.run(
        trial.spec("rollout_worker", 0, once),
        trial.spec("master_worker", 0, FOREVER),
        until=["rollout_worker/0", "master_worker/0"],
        then=stop,
    )
    assert outcome.status == "interrupted" and [death.returncode for death in outcome.restarted] == [code]
    early = ", before its work was done" if code == 0 else ""
    assert trial.notes[0].startswith(f"rollout_worker/0 exited with code {code}{early}; restart 1/2 ")


def test_process_without_pidfd_is_not_left_behind(trial, monkeypatch):
    def too_many(pid, flags=0):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", too_many)
    outcome = trial.run(trial.spec("master_worker", 0, FOREVER), stop_timeout_s=600)
    assert outcome.status == "failed" and not outcome.killed
    assert outcome.reason == "master_worker/0 cannot be started: [Errno 24] Too many open files"


# ---- the launcher itself fails


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failing_display_ends_the_run(trial):
    class Full(list[str]):
        append = no_space  # type: ignore[assignment]

    trial.notes = Full()
    outcome = trial.run(trial.spec("rollout_worker", 0, "raise SystemExit(1)"), trial.spec("master_worker", 0, FOREVER))
    assert outcome.status == "failed"
    assert outcome.reason == "the launcher failed: OSError: [Errno 28] No space left on device"


def test_unreadable_checkpoints_end_the_run(trial):
    trial.recover = True
    outcome = trial.run(
        trial.spec("rollout_worker", 0, FOREVER),
        trial.spec("model_worker", 0, "raise SystemExit(1)"),
        trial.spec("master_worker", 0, FOREVER),
        checkpoint=no_space,
    )
    assert outcome.status == "failed" and "the launcher failed: OSError" in outcome.reason


def test_exception_at_the_start_ends_the_run(trial):
    async def broken(spec, host):
        raise ValueError("no such thing")

    outcome = trial.run(trial.spec("name_store", 0, FOREVER), name_store_ready=broken)
    assert (outcome.status, outcome.reason) == ("failed", "the launcher failed: ValueError: no such thing")


# ---- others


def test_processes_of_others_are_left_alone(trial):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        outcome = trial.run(trial.spec("model_worker", 0, "raise SystemExit(1)"))
        assert other.poll() is None
        assert not outcome.killed
    finally:
        other.communicate(b"\n")
    assert other.returncode == 0


def test_nothing_is_left_behind_but_the_logs(trial):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    trial.run(trial.spec("rollout_worker", 0, FOREVER), trial.spec("master_worker", 0, "pass"))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {p.name for p in trial.folder.iterdir()} == {"rollout_worker-0.log", "master_worker-0.log"}

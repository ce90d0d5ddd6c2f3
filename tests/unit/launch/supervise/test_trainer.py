"""The supervisor when a process of the trainer dies: all of them restart, and no others."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from realsys.cluster.process import ErrorRecord
from realsys.launch.supervise.failures import first_failure
from realsys.launch.supervise.supervisor import Supervisor
from tests.support.processes.supervised import FOREVER, READY, STUBBORN, Trial, log, stop, waits_for

pytestmark = pytest.mark.processes

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
        ("os._exit(0)", "exited with code 0, before its work was done"),
    ],
)
def test_death_of_a_rank_restarts_only_the_trainer(trial: Trial, victim: str, how: str) -> None:
    trial.recover = True
    # The others ignore SIGTERM, and wait for ever: they have to be killed before the trainer can restart.
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
    assert note.startswith(f"model_worker/1 {how}; restart 1/2 of the trainer in 0.0 s, from step 40 (")
    for name in ("model_worker/0", "model_worker/1", "master_worker/0"):
        assert log(trial, name)[-1].startswith("2 ")
    for name in ("gserver_manager/0", "rollout_worker/0"):
        assert len(log(trial, name)) == 1 and log(trial, name)[0].startswith("None ")
    assert len(outcome.recovered) == 3


def test_worker_that_dies_with_the_trainer_restarts_too(trial: Trial) -> None:
    """Both in their own time; neither counts for the other's budget."""
    trial.recover = True
    pipe, again = trial.folder / "pipe", trial.folder / "again"
    os.mkfifo(pipe)
    worker = SHOW + f"if not os.path.exists({str(again)!r}):\n    open({str(again)!r}, 'w').close()\n"
    worker += f"    open({str(pipe)!r}).read(); os._exit(1)\nready(); signal.pause()"  # dies of the rank's death
    outcome = trial.run(
        trial.spec("rollout_worker", 0, worker),
        trial.spec("model_worker", 0, at_second_start(f"open({str(pipe)!r}, 'w'); os.kill(os.getpid(), 9)")),
        trial.spec("master_worker", 0, at_second_start("signal.pause()")),
        until=["rollout_worker/0", "model_worker/0", "master_worker/0"],
        then=stop,
    )
    assert outcome.status == "interrupted" and not outcome.deaths
    assert {death.name for death in outcome.restarted} == {"model_worker/0", "rollout_worker/0"}
    assert all("restart 1/2" in note for note in trial.notes) and len(trial.notes) == 2


def test_spent_trainer_budget_reports_the_first_death(trial: Trial) -> None:
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


def test_master_that_exits_0_early_is_restarted(trial: Trial) -> None:
    """Code of the user that calls sys.exit(): its run must not count as done."""
    trial.recover = True
    done = iter([False, True])
    outcome = trial.run(trial.spec("master_worker", 0, "raise SystemExit(0)"), finished=lambda: next(done))
    assert outcome.status == "done" and len(outcome.restarted) == 1
    assert trial.notes[0].startswith("master_worker/0 exited with code 0, before its work was done; restart 1/2 ")


def test_new_checkpoint_gives_trainer_budget_back(trial: Trial) -> None:
    trial.recover = True
    dies = "import os; n = int(os.environ['REALSYS_TRAINING_START']); os._exit(10 + n if n < 6 else 0)"
    steps = iter([0, 0, 20, 20, 40, 40])
    outcome = trial.run(trial.spec("master_worker", 0, dies), checkpoint=lambda: next(steps))
    assert outcome.status == "done" and len(outcome.restarted) == 5
    assert [note.split("restart ")[1].split()[0] for note in trial.notes] == ["1/2", "2/2", "1/2", "2/2", "1/2"]


def bad_input(pid: int) -> ErrorRecord:
    return ErrorRecord(1.0, "model_worker", 0, pid, socket.gethostname(), "DataError", "line 3", "", exit_code=2)


def test_permanent_failure_of_a_peer_ends_run(trial: Trial) -> None:
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
        errors=lambda: [bad_input(int(said.read_text()))] if said.exists() else [],
    )
    assert outcome.status == "failed" and not outcome.restarted and not outcome.recovered
    assert 2 in {death.returncode for death in outcome.deaths}


def test_signal_while_trainer_is_down_ends_run(trial: Trial) -> None:
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

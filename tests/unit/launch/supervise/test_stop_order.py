"""The order in which the supervisor starts and stops real child processes; the name store is first and last."""

import asyncio
import os
import signal
import socket

import pytest

from realsys.cluster.process import ErrorRecord
from realsys.errors import WaitTimeout
from realsys.launch.supervise.failures import first_failure
from tests.support.processes.supervised import FOREVER, READY, STUBBORN, log, stop, waits_for

pytestmark = pytest.mark.processes


def test_master_is_stopped_before_the_others(trial):
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


def test_stubborn_master_leaves_the_others_their_time(trial):
    outcome = trial.run(
        trial.spec("model_worker", 0, FOREVER),
        trial.spec("master_worker", 0, STUBBORN),
        until=["model_worker/0", "master_worker/0"],
        then=stop,
        stop_timeout_s=2.0,
    )
    assert outcome.killed == ["master_worker/0"]


def test_stop_waits_for_a_master_that_progresses(trial):
    """Four looks with progress, each within the bound on each wait; then the master ends."""
    done = trial.folder / "done"
    master = waits_for("SIGTERM") + f"import time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"
    looks = iter(range(1, 100))

    def stopping():
        if (look := next(looks)) == 4:
            done.touch()
        return f"saving step 7\n{look}", 0

    outcome = trial.run(
        trial.spec("model_worker", 0, waits_for("SIGTERM")),
        trial.spec("master_worker", 0, master),
        until=["model_worker/0", "master_worker/0"],
        then=stop,
        stop_timeout_s=1.2,
        stopping=stopping,
    )
    assert outcome.status == "interrupted" and not outcome.killed
    assert trial.notes == ["saving step 7 (a second Ctrl-C ends the run without waiting)"]


def test_name_store_starts_first_and_stops_last(trial):
    order = trial.folder / "order"
    script = READY + f"out = open({str(order)!r}, 'a', buffering=1)\n"
    script += "def ended(*_):\n    out.write('end ' + sys.argv[2] + chr(10)); os._exit(0)\n"
    script += (
        "signal.signal(signal.SIGTERM, ended); out.write('start ' + sys.argv[2] + chr(10)); ready(); signal.pause()"
    )

    async def answers(spec, host):
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


def test_silent_name_store_ends_the_run(trial):
    async def silent(spec, host):
        raise WaitTimeout("etcd at 127.0.0.1:1 did not answer within 1 s")

    specs = [trial.spec("name_store", 0, FOREVER), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, name_store_ready=silent)
    assert outcome.status == "failed"
    assert outcome.reason == "name_store/0: etcd at 127.0.0.1:1 did not answer within 1 s"
    assert not (trial.folder / "master_worker-0.log").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait_for_name_store(trial, signum):
    async def interrupted(spec, host):
        os.kill(os.getpid(), signum)
        await asyncio.Event().wait()

    specs = [trial.spec("name_store", 0, FOREVER), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, name_store_ready=interrupted)
    assert outcome.status == "interrupted" and outcome.signal == signum
    assert not (trial.folder / "master_worker-0.log").exists(), "nothing more is started"


# ---- The supervisor when a process of the trainer dies: all of them restart, and no others


SHOW = READY + "print(os.environ.get('REALSYS_TRAINING_START'), os.getpid(), flush=True)\n"
SHOWN = SHOW + "ready(); signal.pause()"


def at_second_start(then):
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
def test_death_of_a_rank_restarts_only_the_trainer(trial, victim, how):
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


def test_worker_that_dies_with_the_trainer_restarts_too(trial):
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


def test_spent_trainer_budget_reports_the_first_death(trial):
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


def test_master_that_exits_0_early_is_restarted(trial):
    """Code of the user that calls sys.exit(): its run must not count as done."""
    trial.recover = True
    done = iter([False, True])
    outcome = trial.run(trial.spec("master_worker", 0, "raise SystemExit(0)"), finished=lambda: next(done))
    assert outcome.status == "done" and len(outcome.restarted) == 1
    assert trial.notes[0].startswith("master_worker/0 exited with code 0, before its work was done; restart 1/2 ")


def test_new_checkpoint_gives_trainer_budget_back(trial):
    trial.recover = True
    dies = "import os; n = int(os.environ['REALSYS_TRAINING_START']); os._exit(10 + n if n < 6 else 0)"
    steps = iter([0, 0, 20, 20, 40, 40])
    outcome = trial.run(trial.spec("master_worker", 0, dies), checkpoint=lambda: next(steps))
    assert outcome.status == "done" and len(outcome.restarted) == 5
    assert [note.split("restart ")[1].split()[0] for note in trial.notes] == ["1/2", "2/2", "1/2", "2/2", "1/2"]


def bad_input(pid):
    return ErrorRecord(1.0, "model_worker", 0, pid, socket.gethostname(), "DataError", "line 3", "", exit_code=2)


def test_permanent_failure_of_a_peer_ends_run(trial):
    """The MasterWorker ends of what a rank told it; that the input is bad, the rank says itself."""
    trial.recover = True
    said, master = trial.folder / "said", trial.folder / "master"
    rank = waits_for("SIGUSR1") + f"open({str(said)!r}, 'w').write(str(os.getpid()))\n"
    rank += f"os.kill(int(open({str(master)!r}).read()), signal.SIGUSR1); os._exit(2)"

    def fail(supervisor):
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


def test_signal_while_trainer_is_down_ends_run(trial):
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

"""The order in which the supervisor starts and stops real child processes; the name store is first and last."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from realsys.errors import WaitTimeout
from realsys.launch.process_plan import ProcessSpec
from tests.support.processes.supervised import FOREVER, READY, STUBBORN, Trial, log, stop, waits_for

pytestmark = pytest.mark.processes


def test_master_is_stopped_before_the_others(trial: Trial) -> None:
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


def test_stubborn_master_leaves_the_others_their_time(trial: Trial) -> None:
    outcome = trial.run(
        trial.spec("model_worker", 0, FOREVER),
        trial.spec("master_worker", 0, STUBBORN),
        until=["model_worker/0", "master_worker/0"],
        then=stop,
        stop_timeout_s=2.0,
    )
    assert outcome.killed == ["master_worker/0"]


def test_stop_waits_for_a_master_that_progresses(trial: Trial) -> None:
    """Four looks with progress, each within the bound on each wait; then the master ends."""
    done = trial.folder / "done"
    master = waits_for("SIGTERM") + f"import time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"
    looks = iter(range(1, 100))

    def stopping() -> tuple[str, int]:
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


def test_name_store_starts_first_and_stops_last(trial: Trial) -> None:
    order = trial.folder / "order"
    script = READY + f"out = open({str(order)!r}, 'a', buffering=1)\n"
    script += "def ended(*_):\n    out.write('end ' + sys.argv[2] + chr(10)); os._exit(0)\n"
    script += (
        "signal.signal(signal.SIGTERM, ended); out.write('start ' + sys.argv[2] + chr(10)); ready(); signal.pause()"
    )

    async def answers(spec: ProcessSpec, host: str) -> None:
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


def test_silent_name_store_ends_the_run(trial: Trial) -> None:
    async def silent(spec: ProcessSpec, host: str) -> None:
        raise WaitTimeout("etcd at 127.0.0.1:1 did not answer within 1 s")

    specs = [trial.spec("name_store", 0, FOREVER), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, name_store_ready=silent)
    assert outcome.status == "failed"
    assert outcome.reason == "name_store/0: etcd at 127.0.0.1:1 did not answer within 1 s"
    assert not (trial.folder / "master_worker-0.log").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait_for_name_store(trial: Trial, signum: signal.Signals) -> None:
    async def interrupted(spec: ProcessSpec, host: str) -> None:
        os.kill(os.getpid(), signum)
        await asyncio.Event().wait()

    specs = [trial.spec("name_store", 0, FOREVER), trial.spec("master_worker", 0, FOREVER)]
    outcome = trial.run(*specs, name_store_ready=interrupted)
    assert outcome.status == "interrupted" and outcome.signal == signum
    assert not (trial.folder / "master_worker-0.log").exists(), "nothing more is started"


def test_second_signal_ends_the_wait_for_name_store(trial: Trial) -> None:
    waiting = asyncio.Event()

    async def silent(spec: ProcessSpec, host: str) -> None:
        waiting.set()
        await asyncio.Event().wait()

    outcome = trial.run(
        trial.spec("name_store", 0, STUBBORN),
        until=["name_store/0"],
        then=lambda s: (stop(s), stop(s))[0],
        name_store_ready=silent,
        stop_timeout_s=600,
    )
    assert outcome.status == "interrupted" and outcome.killed == ["name_store/0"] and waiting.is_set()

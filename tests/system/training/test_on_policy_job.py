"""Staleness bound 0: every batch is of exactly one version, also after the training side went back to a checkpoint."""

import signal

import pytest

from realsys.launch.cli import main
from realsys.manager.ledger.events import Granted, RolledBack, Trained
from realsys.manager.ledger.journal import read_journal
from realsys.observe.step_log import StepTail
from tests.support.jobs.jobs import arith, processes_of, running

pytestmark = pytest.mark.system

ON_POLICY = [
    "asynchronous.max_staleness=0",
    "warmup.steps=2",
    "evaluation.problems=0",
    "train.batch_groups=4",
    "rollout.group_size=2",
    "rollout.workers=1",
    "checkpoint.every_steps=2",
    "train.total_steps=100000",
]


def test_eta_zero_trains_one_version_per_batch(tmp_path):
    """Also after the training side went back to a checkpoint."""
    root, argv = arith(tmp_path, "on-policy", *ON_POLICY)
    with running(root, argv) as live:
        live.until_step(3)
        live.kill("master_worker/0")
        went_back = live.until(lambda: live.job.records("recovered"), "training goes on")[0]["step"]
        live.until_step(went_back + 3)
        live.process.send_signal(signal.SIGINT)
        job = live.wait()
    assert job.returncode == 130, job.report()
    steps = job.records("train")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), "one line of training"
    # Also of the steps that were undone.
    for record in StepTail(job.paths.steps).read():
        if record["kind"] == "train":
            assert record["staleness"]["histogram"] == {"0": record["sequences"]}, record
    granted: dict[str, int] = {}
    trained, back_to = 0, list[int]()
    for event, _ in read_journal(job.paths.ledger):
        match event:
            case Granted():
                granted[event.ticket_id] = event.version
            case RolledBack():
                back_to.append(event.version)
            case Trained():
                trained += 1
                assert event.oldest == [event.version - 1] * 4, event
                assert {granted[ticket] for ticket in event.tickets} == {event.version - 1}, event
    assert trained >= len(steps) and back_to[-1] == went_back
    assert went_back % 2 == 0 and went_back >= 2
    assert main(["audit", str(root)]) == 0
    assert processes_of(root) == []

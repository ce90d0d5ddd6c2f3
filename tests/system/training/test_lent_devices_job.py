"""Servers and ranks that use the same devices in turn, in whole runs."""

import json

import pytest

from realsys.launch.commands.audit import audit_trial
from tests.support.jobs.jobs import arith, running
from tests.support.jobs.ledgers import check_staleness

pytestmark = pytest.mark.system

LENT = ["allocation=serve.d1|d1", "train.batch_groups=4", "rollout.group_size=2", "rollout.workers=1"]
STEPS = 6


def check_done(job, steps=STEPS):
    job.completed()
    assert [record["step"] for record in job.records("train")] == list(range(1, steps + 1))
    check_staleness(job, eta=4)
    audit = audit_trial(job.paths)
    assert audit.ok, audit
    assert audit.states["trained"] == 4 * steps and audit.steps == steps
    assert json.loads(job.paths.summary.read_text())["status"] == "done"


def test_servers_and_ranks_take_turns(tmp_path):
    root, argv = arith(tmp_path, "turns", *LENT, f"train.total_steps={STEPS}", "evaluation.every_steps=2")
    with running(root, argv) as live:
        job = live.wait()
    check_done(job)
    assert all(record["seconds"]["switch"] >= 0 for record in job.records("train"))
    assert {record["eval_id"] for record in job.records("eval")} == {"before", "step-2", "step-4", "after"}

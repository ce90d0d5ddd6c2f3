"""Whole jobs over hosts whose network fails for 30 s: no step is lost, no ticket is lost or trained twice.

Every host resolves its own name to 127.0.1.1, and no two name their interfaces alike. Not part of `make test`: half of
the time passes while the network is down.
"""

import pytest

from tests.support.jobs.host_jobs import etcd_on, job_on
from tests.support.jobs.ledgers import check_ledger, check_recovered, check_staleness
from tests.support.processes.netns import Hosts

pytestmark = [pytest.mark.system, pytest.mark.needs("netns"), pytest.mark.needs("etcd")]

PARTITION_S = 30.0
STEPS = 24
SETTINGS = [
    *("allocation=serve.d2+d2", "rollout.workers=2", "warmup.steps=2", "evaluation.problems=0"),
    *(f"train.total_steps={STEPS}", "checkpoint.every_steps=1", "name_store=etcd"),
]


def test_short_partitions_cost_nothing(tmp_path):
    """Trainer and servers part, later all lose etcd; less than a lease each time, so no process ends."""
    with Hosts(5, racks=(0, 0, 1, 1, 2)) as hosts, etcd_on(hosts, 4, tmp_path) as address:
        store = [f"cluster.name_store.address={address}", "cluster.lease_s=60"]
        with job_on(hosts, tmp_path, 4, *SETTINGS, *store) as running:
            live = running.live
            live.until_step(2)
            running.interrupted(lambda heal: hosts.part(0, 1, heal=heal), PARTITION_S)
            parted = live.steps_done()
            live.until_step(parted + 2)
            running.interrupted(lambda heal: hosts.cut(4, heal=heal), PARTITION_S)
            away = live.steps_done()
            job = live.wait().completed()
    assert parted < away < STEPS == len(job.records("train")), "both partitions began and ended within the training"
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    check_staleness(job, eta=4)
    assert not list(job.paths.errors.glob("*"))


def test_etcd_away_beyond_the_lease_loses_nothing(tmp_path):
    """All leases lapse, so every worker ends. All start again, the trainer from its last step."""
    with Hosts(5) as hosts, etcd_on(hosts, 4, tmp_path) as address:
        store = [f"cluster.name_store.address={address}", "cluster.lease_s=20"]
        with job_on(hosts, tmp_path, 4, *SETTINGS, *store) as running:
            running.live.until_step(2)
            running.interrupted(lambda heal: hosts.cut(4, heal=heal), PARTITION_S)
            done = running.live.steps_done()
            job = running.live.wait().completed()
    check_recovered(job, steps=STEPS, at_least=done - 1)


def test_node_away_beyond_the_lease_loses_nothing(tmp_path):
    """The first of two nodes has launcher, MasterWorker, a rank and etcd. All processes of the other one end."""
    with Hosts(2, ipv6=True) as hosts:
        store = ["cluster.name_store.start=true", "cluster.lease_s=20"]
        with job_on(hosts, tmp_path, 2, *SETTINGS, *store) as running:
            running.live.until_step(2)
            running.interrupted(lambda heal: hosts.cut(0, heal=heal), PARTITION_S)
            done = running.live.steps_done()
            job = running.live.wait().completed()
    check_recovered(job, steps=STEPS, at_least=done - 1)
    assert "was lost with its node node1: nothing was heard from its agent for 22 s" in job.stdout

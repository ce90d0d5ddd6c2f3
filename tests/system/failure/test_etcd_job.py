"""A whole job whose processes find each other through etcd."""

import pytest

from realsys.cluster.store.connect import trial_names
from realsys.cluster.store.etcd_store import EtcdNameStore
from realsys.config.dump import read_config
from tests.support.jobs.jobs import processes_of, run_arith
from tests.support.jobs.ledgers import check_ledger, check_staleness

pytestmark = [pytest.mark.system, pytest.mark.needs("etcd")]


def test_job_on_etcd_leaves_no_key(tmp_path, etcd_server):
    job = run_arith(
        tmp_path,
        "etcd",
        "name_store=etcd",
        f"cluster.name_store.address={etcd_server.address}",
        "rollout.workers=1",
        "warmup.steps=2",
        "train.total_steps=2",
        "evaluation.problems=4",
    ).completed()
    assert not job.paths.name_store.exists()
    assert "http://127.0.0.1:" in job.stdout  # the launcher found the manager there too
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    check_staleness(job, eta=4)
    assert processes_of(job.root) == []
    names = trial_names(read_config(job.paths.config))
    store = EtcdNameStore(etcd_server.address, call_timeout_s=60.0)
    try:
        assert store.get_subtree(names.root) == {}
    finally:
        store.close()

"""Whole jobs whose processes find each other through etcd."""

import re
import signal

import pytest

from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.cluster.names.etcd_store import EtcdNameStore
from realsys.config.paths import TrialPaths, read_config
from tests.support.jobs.jobs import arith, processes_of, run_arith, running
from tests.support.jobs.ledgers import check_ledger, check_staleness
from tests.support.processes.etcd_cluster import EtcdCluster
from tests.support.processes.ports import lasting_ports

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


def test_job_on_ipv6_keeps_to_its_ports(tmp_path):
    """Every address of the job is [::1], with a port of the range, or a file; so is that of its own etcd."""
    own, low = lasting_ports(2)
    settings = [
        *("name_store=etcd", "cluster.name_store.start=true", f"cluster.name_store.address='[::1]:{own}'"),
        *("cluster.host=::1", f"cluster.ports={low}-{low + 199}", "allocation=serve.d1+d2"),
        *("warmup.steps=2", "train.total_steps=100000", "evaluation.problems=0"),
    ]
    root, argv = arith(tmp_path, "ipv6", *settings)
    with running(root, argv) as live:
        live.until_step(1)
        config = read_config(TrialPaths(root).config)
        names = trial_names(config)
        store = make_name_store(config, TrialPaths(root), call_timeout_s=60.0)
        advertised = {key.removeprefix(f"{names.root}/"): text for key, text in store.get_subtree(names.root).items()}
        store.close()
        live.process.send_signal(signal.SIGINT)
        job = live.wait()
    assert job.returncode == 130, job.report()
    listening = {key: set(re.findall(r"([^/\"]+):(\d+)\b", text)) for key, text in advertised.items() if "::1" in text}
    assert set(listening) == {"generation_server/0", "gserver_manager", "trainer/torch_store"}
    assert all("ipc:///" in advertised[key] for key in ("pull/0", "pull/1", "trainer/request_reply"))
    for key, addresses in listening.items():
        assert [host for host, _ in addresses] == ["[::1]"], key
        assert all(low <= int(port) < low + 200 for _, port in addresses), key
    check_ledger(job, batch_groups=8, eta=4, prompts=400)


def test_job_outlives_the_leader_in_every_phase(tmp_path):
    """Three members: the leader is killed, and started again, while the job starts, trains and ends."""
    cluster = EtcdCluster(tmp_path)
    cluster.start()
    settings = ["name_store=etcd", f"cluster.name_store.address='{cluster.address}'", "train.total_steps=6"]
    root, argv = arith(tmp_path, "leaders", *settings, "warmup.steps=2", "evaluation.problems=0")

    def lose_leader():
        leader = cluster.leader()
        cluster.kill(leader)
        cluster.start_member(leader)

    try:
        with running(root, argv) as live:
            live.until(lambda: live.job.records("phase"), "the phase connect")
            for step in (1, 3, 6):
                lose_leader()
                live.until_step(step)
            lose_leader()
            job = live.wait().completed()
    finally:
        cluster.close()
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert not list(job.paths.errors.glob("*")) and "restart" not in job.stdout

"""The etcd that a run starts for itself, with real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from realsys.cluster.names.etcd_store import EtcdAccess, EtcdNameStore
from realsys.cluster.process import RUN_ID, SHIELDED, read_errors
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from realsys.errors import NameStoreError, WaitTimeout
from realsys.launch.run import etcd_answers
from realsys.launch.trial_folder import tidy
from realsys.workers.name_store import ensure_certificate
from tests.support.processes.ports import lasting_ports

BOUND_S = 60.0

RUN = "arith-t-0123abcd"

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture
def config(tmp_path):
    store = {"backend": "etcd", "start": True, "address": f"127.0.0.1:{lasting_ports(1)[0]}"}
    made = Config.model_validate({"fileroot": str(tmp_path), "cluster": {"name_store": store}})
    write_config(made, TrialPaths(tmp_path).config)
    return made


def start(folder, **environment):
    argv = [sys.executable, "-m", "realsys.workers.name_store", "--trial-dir", str(folder), "--index", "0"]
    return subprocess.Popen(argv, env={**os.environ, RUN_ID: RUN, **environment})


@pytest.fixture
def worker(tmp_path, config):
    process = start(tmp_path, **{SHIELDED: "1"})
    yield process
    process.kill()
    process.wait(BOUND_S)


def test_etcd_of_a_job_outlives_sigterm(worker, config, tmp_path):
    """scancel sends SIGTERM to every process. The last checkpoint needs the leases of the workers."""
    access = EtcdAccess.by_one_file(TrialPaths(tmp_path).etcd_certificate)
    asyncio.run(etcd_answers(config.cluster.name_store.address, access, RUN, BOUND_S))  # the certificate is there
    store = EtcdNameStore(config.cluster.name_store.address, BOUND_S, BOUND_S, access, known=True)
    try:
        lease = store.lease(30.0)
        store.add("r/key", "1", lease=lease)
        [etcd] = psutil.Process(worker.pid).children()
        for process in (etcd, worker):
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs([etcd], BOUND_S)
        assert store.get("r/key") == "1"
        lease.keep_alive()
    finally:
        store.close()
    [etcd] = psutil.Process(worker.pid).children()
    worker.send_signal(signal.SIGINT)
    assert worker.wait(BOUND_S) == 0
    assert not etcd.is_running()


def refusal(folder, **environment):
    """The message of the error file, with which the launcher ends the run at once."""
    assert start(folder, **environment).wait(BOUND_S) == 2
    [record] = read_errors(TrialPaths(folder).errors)
    assert record.worker == "name_store/0" and record.permanent and record.exit_code == 2
    return record.message


def test_taken_port_of_own_etcd_is_named(tmp_path, config):
    address = config.cluster.name_store.address
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        message = refusal(tmp_path)
    assert f"cluster.name_store.address='{address}': cannot be bound on {socket.gethostname()}: Address" in message
    assert "set another port" in message


def test_machine_without_etcd_is_named(tmp_path, config):
    message = refusal(tmp_path, PATH=str(tmp_path))
    assert f"there is no program named etcd on the PATH of {socket.gethostname()}: install etcd-server" in message


def test_etcd_of_another_run_is_not_used(worker, config, tmp_path):
    """It answers at the port that this run's etcd could not take."""
    address = config.cluster.name_store.address
    access = EtcdAccess.by_one_file(TrialPaths(tmp_path).etcd_certificate)
    asyncio.run(etcd_answers(address, access, RUN, BOUND_S))
    with pytest.raises(WaitTimeout, match=f"etcd at {address} did not answer .* it is the etcd of another run .{RUN}"):
        asyncio.run(etcd_answers(address, access, "arith-other-0123abcd", 0.2))


def test_only_members_of_the_trial_reach_its_etcd(worker, config, tmp_path):
    """A stranger could register a false server, and would get the token of the trial."""
    address, certificate = config.cluster.name_store.address, TrialPaths(tmp_path).etcd_certificate
    member = EtcdAccess.by_one_file(certificate)
    asyncio.run(etcd_answers(address, member, RUN, BOUND_S))
    assert certificate.stat().st_mode & 0o077 == 0
    other = tmp_path / "other" / "etcd.pem"
    ensure_certificate(other, "127.0.0.1")
    store = EtcdNameStore(address, BOUND_S, BOUND_S, member)
    store.add("r/key", "1")
    strangers = {
        "without TLS": EtcdAccess(),
        "without a certificate": EtcdAccess(ca=str(certificate)),
        "with that of another trial": replace(EtcdAccess.by_one_file(other), ca=str(certificate)),
    }
    for who, access in strangers.items():
        with pytest.raises(NameStoreError):
            EtcdNameStore(address, 1.0, 1.0, access).add("r/key2", who)
    # A client does not speak to an etcd with another certificate, which may have taken the port.
    with pytest.raises(NameStoreError, match="CERTIFICATE_VERIFY_FAILED"):
        EtcdNameStore(address, 1.0, 1.0, EtcdAccess.by_one_file(other)).get("r/key")
    assert store.get_subtree("r") == {"r/key": "1"}
    store.close()


def test_certificate_stays_for_running_clients(tmp_path):
    """etcd that starts again in a run has the certificate that they have read; a new run makes another one."""
    path = TrialPaths(tmp_path).etcd_certificate
    authority = ensure_certificate(path, "fd00::7")
    first = path.read_bytes()
    assert ensure_certificate(path, "fd00::7") == authority
    assert path.read_bytes() == first and first.startswith(authority.read_bytes())
    tidy(TrialPaths(tmp_path))
    assert list(path.parent.iterdir()) == []
    ensure_certificate(path, "node-3")
    assert path.read_bytes() != first and path.stat().st_mode & 0o077 == 0

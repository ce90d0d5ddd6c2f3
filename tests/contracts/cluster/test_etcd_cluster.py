"""A cluster of etcd members: one of them dies or hangs, TLS, users."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from realsys.cluster.names.contract import Tree
from realsys.cluster.names.etcd_store import EtcdNameStore
from realsys.cluster.process import read_errors
from realsys.errors import ConfigError, NameStoreError
from realsys.launch.prepare import check_etcd
from tests.support.processes.etcd_cluster import Certificates, EtcdCluster
from tests.support.processes.tester_trial import Follower, Trial

BOUND_S = 60.0
LEASE_S = 20.0

pytestmark = pytest.mark.needs("etcd")


@pytest.fixture
def cluster(tmp_path):
    made = EtcdCluster(tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def stores(cluster):
    """One client at each member: a client starts at a place in its list that depends on its process."""
    a, b, c = cluster.addresses
    made = [EtcdNameStore(",".join(order), 6.0, LEASE_S) for order in ((a, b, c), (b, c, a), (c, a, b))]
    yield made
    for store in made:
        store.close()


def until(changes, *keys):
    """Wait for a tree with all ``keys``. The last tree stays in the queue, because a later wait may need it."""
    while True:
        tree = changes.get(timeout=BOUND_S)
        if all(key in tree for key in keys):
            return changes.put(tree)


@pytest.fixture
def followed(stores):
    """A leased key and a watch of each client."""
    changes: list[queue.SimpleQueue[Tree]] = [queue.SimpleQueue() for _ in stores]
    for number, store in enumerate(stores):
        store.add(f"r/leased/{number}", "1", lease=store.lease(LEASE_S))
        store.watch("r", changes[number].put)
    yield changes


def test_death_of_the_leader_loses_nothing(cluster, stores, followed):
    """Every client writes and renews all the time, whichever member it is at: no call fails, and no lease lapses."""
    stop, written = threading.Event(), [0] * len(stores)

    def write(number):
        lease = stores[number].lease(LEASE_S)
        while not stop.wait(0.02):
            stores[number].add(f"r/{number}/{written[number] + 1}", "1", replace=True)
            written[number] += 1
            lease.keep_alive()

    with ThreadPoolExecutor(len(stores)) as pool:
        writing = [pool.submit(write, number) for number in range(len(stores))]
        for number, changes in enumerate(followed):
            until(changes, f"r/{number}/2")
        cluster.kill(cluster.leader())
        cluster.leader()
        before = list(written)
        for number, changes in enumerate(followed):
            until(changes, f"r/{number}/{before[number] + 2}")
        stop.set()
        for ended in writing:
            ended.result(BOUND_S)
    last = {f"r/{number}/{count}" for number, count in enumerate(written)}
    every = {f"r/{number}/{each}" for number, count in enumerate(written) for each in range(1, count + 1)}
    assert set(stores[0].get_subtree("r")) == every | {f"r/leased/{number}" for number in range(len(stores))}
    for changes in followed:
        until(changes, *last)


def test_no_worker_notices_the_death_of_the_leader(tmp_path, cluster):
    """Three processes, with a lease that is longer than an election."""
    (tmp_path / "trial").mkdir()
    trial = Trial(tmp_path / "trial", lease_s=LEASE_S, backend="etcd", address=cluster.address)
    try:
        follower = Follower(trial)
        others = [trial.start("quick(); ctx.stop.wait()", index) for index in (1, 2)]
        for index in (1, 2):
            trial.until(trial.names.heartbeat(f"tester/{index}"), bool)
        cluster.kill(cluster.leader())
        cluster.leader()
        follower.goes_on()
        for process in others:
            process.terminate()
            trial.ends(process, 0)
        assert read_errors(trial.paths.errors) == []
    finally:
        trial.close()


@pytest.mark.parametrize("after_leader", [0, 1], ids=["leader", "follower"])
def test_clients_leave_a_member_that_hangs(cluster, stores, followed, after_leader):
    """Its connections stay, so only the time limit of a try tells."""
    hanging = (cluster.leader() + after_leader) % len(cluster.addresses)
    cluster.suspend(hanging)
    try:
        for number, store in enumerate(stores):
            store.add("r/new", str(number), replace=True)
            lease = store.lease(LEASE_S)
            lease.keep_alive()
        for changes in followed:
            until(changes, "r/new")
    finally:
        cluster.resume(hanging)


@pytest.fixture
def guarded(tmp_path):
    """One member that wants certificates, and a user."""
    made = EtcdCluster(tmp_path, 1, Certificates.make(tmp_path / "certificates"))
    made.start()
    made.require_users("realsys", "a secret")
    yield made
    made.close()


@pytest.mark.needs("openssl")
def test_client_with_certificate_and_password_is_served(guarded):
    """Also after a restart of the member, which then does not know the client's token any more."""
    store = EtcdNameStore(guarded.address, 5.0, BOUND_S, replace(guarded.access, user="realsys", password="a secret"))
    changes: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    try:
        lease = store.lease(LEASE_S)
        store.add("realsys/x/leased", "1", lease=lease)
        with store.watch("realsys/x", changes.put):
            guarded.kill(0)
            guarded.start_member(0)
            store.add("realsys/x/new", "2", replace=True)
            until(changes, "realsys/x/new")
        lease.keep_alive()
        assert store.get_subtree("realsys/x") == {"realsys/x/leased": "1", "realsys/x/new": "2"}
    finally:
        store.close()


@pytest.mark.needs("openssl")
def test_client_without_access_is_told_why(guarded, tmp_path):
    other = Certificates.make(tmp_path / "other")
    right = replace(guarded.access, user="realsys", password="a secret")
    for access, problem in [
        (replace(right, password="wrong"), "invalid user ID or password"),
        (guarded.access, "PERMISSION_DENIED: etcdserver: permission denied; check cluster.name_store.user"),
        (replace(right, ca=str(other.ca)), "CERTIFICATE_VERIFY_FAILED"),
        (replace(right, cert=str(other.cert), key=str(other.key)), "did not answer"),
        (replace(right, ca="", cert="", key=""), "did not answer"),
    ]:
        store = EtcdNameStore(guarded.address, 1.0, access=access)
        with pytest.raises(NameStoreError, match=problem) as refused:
            store.get("realsys/key")
        assert "secret" not in f"{refused.value} {access!r}" and "\n" not in str(refused.value)
        store.close()


@pytest.mark.needs("openssl")
def test_worker_logs_in_and_shows_no_password(guarded, tmp_path):
    (tmp_path / "trial").mkdir()
    password = tmp_path / "password"
    password.write_text("a secret\n")
    files = {name: getattr(guarded.access, name) for name in ("ca", "cert", "key")}
    user = {"user": "realsys", "password_file": str(password)}
    trial = Trial(tmp_path / "trial", backend="etcd", address=guarded.address, **files, **user)
    try:
        check_etcd(trial.config, trial.paths)
        process = trial.start("quick(); ctx.stop.wait()")
        trial.ready()
        process.terminate()
        assert "secret" not in trial.ends(process, 0) + trial.paths.config.read_text()
        password.write_text("wrong")
        with pytest.raises(ConfigError, match=r"name_store\.address=.*invalid user ID or password"):
            check_etcd(trial.config, trial.paths)
    finally:
        trial.close()

"""What only etcd has: a server that may be away, and a client library that must be made to work."""

import logging
import queue
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from realsys.cluster.names import etcd_store
from realsys.cluster.names.etcd_store import EtcdNameStore
from realsys.errors import NameStoreError, RealsysError
from tests.support.polling import poll
from tests.support.processes.ports import lasting_ports

BOUND_S = 60.0


@pytest.mark.needs("etcd")
def test_clients_survive_a_restart_of_etcd(own_etcd):
    """Watch, wait and lease continue after the server was killed and restarted."""
    store = EtcdNameStore(own_etcd.address)
    try:
        lease = store.lease(20)
        store.add("r/leased", "1", lease=lease)
        changes: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        waited: queue.SimpleQueue[str] = queue.SimpleQueue()
        waiter = threading.Thread(target=lambda: waited.put(store.wait("late", BOUND_S, "a late key")))
        with store.watch("r", changes.put):
            assert changes.get(timeout=BOUND_S) == {"r/leased": "1"}
            waiter.start()
            own_etcd.kill()
            own_etcd.start()
            # From another client: what changes while a watch is being re-made must not be missed.
            other = EtcdNameStore(own_etcd.address)
            other.add("r/new", "2")
            other.add("late", "here")
            other.close()
            assert changes.get(timeout=BOUND_S) == {"r/leased": "1", "r/new": "2"}
            assert waited.get(timeout=BOUND_S) == "here"
            lease.keep_alive()
            store.add("r/newer", "3")
            assert changes.get(timeout=BOUND_S) == {"r/leased": "1", "r/new": "2", "r/newer": "3"}
        waiter.join(BOUND_S)
    finally:
        store.close()


@pytest.mark.needs("etcd")
def test_watch_lists_once_and_applies_events(etcd_server, monkeypatch):
    """A listing per event would read the whole subtree again for each heartbeat of each worker."""
    store, root = EtcdNameStore(etcd_server.address), uuid.uuid4().hex
    listing = Mock(wraps=store.listing)
    monkeypatch.setattr(store, "listing", listing)
    try:
        changes: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        store.add(f"{root}/a", "1")
        with store.watch(root, changes.put):
            assert changes.get(timeout=BOUND_S) == {f"{root}/a": "1"}
            store.add(f"{root}/b", "2")
            assert changes.get(timeout=BOUND_S) == {f"{root}/a": "1", f"{root}/b": "2"}
            store.delete(f"{root}/a")
            assert changes.get(timeout=BOUND_S) == {f"{root}/b": "2"}
        listing.assert_called_once_with(root)
    finally:
        store.close()


@pytest.mark.needs("etcd")
def test_watch_follows_a_server_without_data(own_etcd, tmp_path):
    """Its revisions start again from one: a watch resumed at the revision it knew would be silent."""
    store = EtcdNameStore(own_etcd.address, call_timeout_s=2.0)
    failed = threading.Event()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: failed.set()  # type: ignore[method-assign]
    logger = logging.getLogger("realsys.cluster.names.etcd_store")
    logger.addHandler(handler)
    try:
        for n in range(20):
            store.add("r/k", str(n), replace=True)
        changes: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        with store.watch("r", changes.put):
            assert changes.get(timeout=BOUND_S) == {"r/k": "19"}
            own_etcd.kill()
            assert failed.wait(BOUND_S)  # it has tried to list, in vain
            (tmp_path / "etcd" / "data").rename(tmp_path / "lost")
            own_etcd.start()
            assert changes.get(timeout=BOUND_S) == {}
            other = EtcdNameStore(own_etcd.address)
            other.add("r/k", "again")
            other.close()
            assert changes.get(timeout=BOUND_S) == {"r/k": "again"}
    finally:
        logger.removeHandler(handler)
        store.close()


@pytest.mark.needs("etcd")
def test_call_waits_for_a_short_absence(own_etcd):
    store = EtcdNameStore(own_etcd.address, call_timeout_s=BOUND_S)
    try:
        store.add("k", "v")
        own_etcd.kill()
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=lambda: answers.put(store.get("k")))
        reader.start()
        own_etcd.start()
        assert answers.get(timeout=BOUND_S) == "v"
        reader.join(BOUND_S)
    finally:
        store.close()


def renewed(lease):
    """Try once. On a busy machine etcd may take longer than that to answer."""
    try:
        lease.keep_alive()
    except NameStoreError:
        return False
    return True


@pytest.mark.needs("etcd")
def test_renewal_does_not_wait_for_hanging_etcd(own_etcd):
    """Other calls wait for the retry timeout."""
    store = EtcdNameStore(own_etcd.address, call_timeout_s=0.5, retry_timeout_s=BOUND_S)
    try:
        lease = store.lease(BOUND_S)
        own_etcd.suspend()
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(store.add, "k", "v", replace=True)
            for _ in range(3):  # longer than one try lasts
                with pytest.raises(NameStoreError, match=r"renew a lease: .* did not answer within 0\.5 s"):
                    lease.keep_alive()
            own_etcd.send(signal.SIGCONT)
            adding.result(BOUND_S)
        assert store.get("k") == "v"
        poll(lambda: renewed(lease), "a renewal of the lease", BOUND_S)
    finally:
        store.close()


def test_calls_without_etcd_end_in_time():
    """The error names the address."""
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    store = EtcdNameStore(address, call_timeout_s=0.15, retry_timeout_s=BOUND_S)
    try:
        calls = [
            lambda: store.add("k", "v"),
            lambda: store.add("k", "v", replace=True),
            lambda: store.get("k"),
            lambda: store.get_subtree("k"),
            lambda: store.delete("k"),
            lambda: store.clear_subtree("k"),
            lambda: store.lease(5),
            lambda: store.watch("k", print),
            lambda: store.wait("k", 5, "a key"),
        ]
        for call in calls:
            with pytest.raises(NameStoreError, match=rf"{address} did not answer within 0\.15 s.*address"):
                call()
    finally:
        store.close()


def test_etcd3_uses_a_private_pool():
    """In a fresh interpreter: it works next to the installed protobuf, and leaves the default pool alone."""
    code = """
from realsys.cluster.names.etcd_store import import_etcd3
etcd3 = import_etcd3()
assert import_etcd3() is etcd3 and etcd3.etcdrpc.rpc_pb2.PutRequest is etcd3.etcdrpc.PutRequest
request = etcd3.etcdrpc.PutRequest(key=b"k", value=b"v", lease=7)
assert etcd3.etcdrpc.PutRequest.FromString(request.SerializeToString()).lease == 7
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindFileByName("rpc.proto")
except KeyError:
    print("apart")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("apart", "")


def test_unknown_etcd3_names_the_required_version(tmp_path, monkeypatch):
    (tmp_path / "etcdrpc").mkdir()
    (tmp_path / "etcdrpc" / "kv_pb2.py").write_text("DESCRIPTOR = None\n")
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "etcd3"}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(etcd_store, "_find_package", lambda: Path(tmp_path / "__init__.py"))
    with pytest.raises(RealsysError, match=r"no serialized descriptor; install etcd3==0\.12\.0"):
        etcd_store.import_etcd3()
    assert not [name for name in sys.modules if name.partition(".")[0] == "etcd3"]

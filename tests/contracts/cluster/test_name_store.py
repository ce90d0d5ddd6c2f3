"""One suite for every backend of the name store: what holds for one holds for all.

Two clients of one store are used where processes would meet; the memory backend has only one.
"""

import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realsys.cluster.names.contract import NameStore, Tree
from realsys.cluster.names.etcd_store import EtcdNameStore
from realsys.cluster.names.file_store import FileNameStore
from realsys.errors import Fenced, KeyExists, KeyMissing, NameStoreError, WaitTimeout
from tests.support.ledger.memory_store import MemoryNameStore

BOUND_S = 60.0
BACKENDS = ["memory", "file", pytest.param("etcd", marks=pytest.mark.needs("etcd"))]
Connect = Callable[[], NameStore]


@pytest.fixture(params=BACKENDS)
def connect(request, tmp_path):
    """Makes clients of one and the same store."""
    opened: list[NameStore] = []
    shared = MemoryNameStore()
    makers: dict[str, Connect] = {
        "memory": lambda: shared,
        "file": lambda: FileNameStore(tmp_path / "names"),
        "etcd": lambda: EtcdNameStore(request.getfixturevalue("etcd_server").address),
    }

    def make():
        opened.append(makers[request.param]())
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(connect):
    return connect()


@pytest.fixture
def short_ttl(store):
    return 1.0 if isinstance(store, EtcdNameStore) else 0.3  # etcd counts in whole seconds


@pytest.fixture
def root():
    """etcd is shared by all tests."""
    return f"t/{uuid.uuid4().hex}"


def until(changes, wanted):
    """Changes may be merged, so only the state to arrive at counts."""
    seen: list[Tree] = []
    deadline = time.monotonic() + BOUND_S
    while wanted not in seen:
        try:
            seen.append(changes.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            pytest.fail(f"the watch never showed {wanted}, only {seen}")


# ---- keys and values


def test_added_value_is_seen_by_another_client(connect, root):
    connect().add(f"{root}/a", "1")
    assert connect().get(f"{root}/a") == "1"


def test_get_of_an_absent_key_names_it(store, root):
    with pytest.raises(KeyMissing, match=f"{root}/nothing"):
        store.get(f"{root}/nothing")


def test_add_creates_only_if_absent(connect, root):
    connect().add(f"{root}/a", "first")
    with pytest.raises(KeyExists, match=f"{root}/a"):
        connect().add(f"{root}/a", "second")
    assert connect().get(f"{root}/a") == "first"


def test_replace_overwrites_and_creates(store, root):
    store.add(f"{root}/a", "1", replace=True)
    store.add(f"{root}/a", "2", replace=True)
    assert store.get(f"{root}/a") == "2"


def test_one_of_many_threads_creates_the_key(connect, root):
    stores = [connect() for _ in range(4)]
    start = threading.Barrier(8)
    won: list[str] = []

    def race(store, name):
        start.wait(BOUND_S)
        try:
            store.add(f"{root}/race", name)
            won.append(name)
        except KeyExists:
            pass

    threads = [threading.Thread(target=race, args=(stores[i % 4], str(i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(won) == 1 and stores[0].get(f"{root}/race") == won[0]


def test_subtree_is_root_and_keys_below(store, root):
    """A key with the same prefix ('a-b') is not in the subtree of 'a'."""
    inside = {f"{root}/s": "own", f"{root}/s/a": "1", f"{root}/s/b/c": "2"}
    for key, value in inside.items():
        store.add(key, value)
    for neighbour in (f"{root}/s-x", f"{root}/s.y", f"{root}/sa", f"{root}/s0", f"{root}/r"):
        store.add(neighbour, "neighbour")
    tree = store.get_subtree(f"{root}/s")
    assert tree == inside and list(tree) == sorted(inside)
    assert store.get_subtree(f"{root}/none") == {}


def test_clear_subtree_spares_neighbours_and_tolerates_nothing(store, root):
    for key in (f"{root}/s", f"{root}/s/a/b", f"{root}/s-x", f"{root}/sa"):
        store.add(key, "v")
    store.clear_subtree(f"{root}/s")
    store.clear_subtree(f"{root}/s")
    assert set(store.get_subtree(root)) == {f"{root}/s-x", f"{root}/sa"}
    store.add(f"{root}/s/a/b", "again")


def test_delete_removes_one_key_only(store, root):
    store.add(f"{root}/a", "1")
    store.add(f"{root}/a/b", "2")
    store.delete(f"{root}/a")
    assert store.get_subtree(root) == {f"{root}/a/b": "2"}
    with pytest.raises(KeyMissing):
        store.delete(f"{root}/a")


@pytest.mark.parametrize("key", ["", "/", "a//b", "/a", "a/", "a/" + "x" * 300])
def test_malformed_key_is_refused_everywhere(store, key):
    operations = [store.get, store.get_subtree, store.clear_subtree, store.delete, lambda k: store.add(k, "v")]
    for operation in [*operations, lambda k: store.watch(k, print)]:
        with pytest.raises(NameStoreError, match="component"):
            operation(key)


CHARACTERS = "ab0 .%@~-=\\\0\n\r\t\x7fé漢\U0001f600\ud800\udfff"
any_component = st.text(CHARACTERS, min_size=1, max_size=12) | st.sampled_from([".", "..", "a@value", "%2E", "%2F"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(components=st.lists(any_component, max_size=3), value=st.text(CHARACTERS + "/"))
def test_any_component_and_any_value_come_back(store, root, components, value):
    """Dots, NULs, percent signs, newlines, lone surrogates: no component can name anything but its own key."""
    fresh = f"{root}/{uuid.uuid4().hex}"
    key = "/".join([fresh, *components])
    store.add(key, value)
    assert store.get(key) == value
    assert store.get_subtree(fresh) == {key: value}


# ---- leases


def test_revoked_lease_removes_its_keys(connect, root):
    store = connect()
    lease = store.lease(30)
    store.add(f"{root}/leased", "1", lease=lease)
    store.add(f"{root}/kept", "2")
    lease.revoke()
    assert connect().get_subtree(root) == {f"{root}/kept": "2"}
    lease.revoke()


def seen_in_time(owner, reader, key, ttl_s):
    """A lease of which the key was there for another client. A machine too slow to look in time gets a longer one."""
    while True:
        began = time.monotonic()
        lease = owner.lease(ttl_s)
        try:
            owner.add(key, "1", lease=lease, replace=True)
            assert reader.get(key) == "1"
            return lease
        except (Fenced, KeyMissing):
            assert time.monotonic() - began >= lease.ttl_s, "lapsed before its end"
        ttl_s *= 4


def test_lapsed_lease_removes_its_keys(connect, root, short_ttl):
    """Renewing a lapsed lease is refused."""
    owner, reader = connect(), connect()
    lease = seen_in_time(owner, reader, f"{root}/leased", short_ttl)
    gone = threading.Event()
    with reader.watch(f"{root}/leased", lambda tree: None if tree else gone.set()):
        assert gone.wait(lease.ttl_s + BOUND_S)
    with pytest.raises(KeyMissing):
        owner.get(f"{root}/leased")
    with pytest.raises(Fenced):
        lease.keep_alive()
    with pytest.raises(Fenced):
        owner.add(f"{root}/late", "1", lease=lease)
    reader.add(f"{root}/leased", "of the next owner")
    with pytest.raises(Fenced):
        lease.keep_alive()
    lease.revoke()
    assert owner.get(f"{root}/leased") == "of the next owner"


def outlives(store, key, ttl_s):
    """False: it could not be seen, as this machine was too slow to keep a lease of ``ttl_s`` alive."""
    kept = begun = time.monotonic()
    lease = store.lease(ttl_s)
    store.add(key, "1", lease=lease, replace=True)
    gone = threading.Event()
    with store.watch(key, lambda tree: None if tree else gone.set()):
        while time.monotonic() < begun + 1.5 * lease.ttl_s:
            now = time.monotonic()
            try:
                lease.keep_alive()
                lost = gone.wait(lease.ttl_s / 4)
            except Fenced:
                lost = True
            if time.monotonic() - kept >= lease.ttl_s:
                return False
            assert not lost
            kept = now
    assert store.get(key) == "1"
    lease.revoke()
    return True


def test_lease_that_is_kept_alive_outlives_its_ttl(store, root, short_ttl):
    while not outlives(store, f"{root}/leased", short_ttl):
        short_ttl *= 4


def test_successor_ends_the_lease_of_a_key(connect, root):
    """The owner's next renewal is refused, and all of its keys are gone."""
    old, new = connect(), connect()
    lease = old.lease(30)
    for name in ("heartbeat", "address"):
        old.add(f"{root}/{name}", "old", lease=lease)
    old.add(f"{root}/unleased", "stays")
    for name in ("heartbeat", "heartbeat", "unleased", "missing"):
        new.end_lease_of(f"{root}/{name}")
    assert new.get_subtree(root) == {f"{root}/unleased": "stays"}
    with pytest.raises(Fenced):
        lease.keep_alive()


def test_taken_key_survives_its_old_lease(connect, root):
    """A successor took the key over; the end of the predecessor's lease does not remove it."""
    old, new = connect(), connect()
    old_lease, new_lease = old.lease(30), new.lease(30)
    old.add(f"{root}/heartbeat", "old", lease=old_lease)
    with pytest.raises(KeyExists):
        new.add(f"{root}/heartbeat", "new", lease=new_lease)
    new.add(f"{root}/heartbeat", "new", lease=new_lease, replace=True)
    old_lease.revoke()
    assert old.get(f"{root}/heartbeat") == "new"
    new_lease.revoke()


def test_lease_of_another_backend_is_a_programming_error(store, root, tmp_path):
    other: NameStore = FileNameStore(tmp_path / "other") if isinstance(store, MemoryNameStore) else MemoryNameStore()
    with pytest.raises(TypeError, match="another backend"):
        store.add(f"{root}/a", "1", lease=other.lease(5))


# ---- waiting and watching


def test_wait_returns_existing_and_later_values(connect, root):
    store, other = connect(), connect()
    store.add(f"{root}/now", "")
    assert store.wait(f"{root}/now", BOUND_S, "a key") == ""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()
    waiter = threading.Thread(target=lambda: found.put(store.wait(f"{root}/later", BOUND_S, "a key")))
    waiter.start()
    other.add(f"{root}/later", "here")
    assert found.get(timeout=BOUND_S) == "here"
    waiter.join(BOUND_S)


def test_wait_timeout_names_the_awaited_thing(store, root):
    with pytest.raises(WaitTimeout, match=rf"0\.1 s for model_worker/3.*{root}/x"):
        store.wait(f"{root}/x", 0.1, "model_worker/3")


def test_interrupt_ends_present_and_later_waits(store, root):
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait():
        with pytest.raises(WaitTimeout, match="stopped while waiting for the master"):
            store.wait(f"{root}/x", 60, "the master")
        ended.put("ended")

    waiter = threading.Thread(target=wait)
    waiter.start()
    store.interrupt()
    assert ended.get(timeout=BOUND_S) == "ended"
    wait()
    waiter.join(BOUND_S)


def test_watch_calls_back_at_each_change(connect, root):
    """The first callback comes before ``watch`` returns."""
    store, other = connect(), connect()
    store.add(f"{root}/w/a", "1")
    changes: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    with store.watch(f"{root}/w", changes.put):
        assert changes.get_nowait() == {f"{root}/w/a": "1"}
        other.add(f"{root}/w/b", "2")
        until(changes, {f"{root}/w/a": "1", f"{root}/w/b": "2"})
        other.add(f"{root}/w/a", "3", replace=True)
        until(changes, {f"{root}/w/a": "3", f"{root}/w/b": "2"})
        other.delete(f"{root}/w/a")
        until(changes, {f"{root}/w/b": "2"})
        other.clear_subtree(f"{root}/w")
        until(changes, {})


def test_watch_delivers_the_last_of_many_changes(connect, root):
    store, other = connect(), connect()
    changes: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    with store.watch(f"{root}/version", changes.put):
        for version in range(50):
            other.add(f"{root}/version", str(version), replace=True)
        until(changes, {f"{root}/version": "49"})


def test_watch_can_be_closed_in_its_callback(store, root):
    """No callback follows."""
    closed = threading.Event()
    calls = itertools.count()
    watches: list = []

    def once(tree):
        next(calls)
        if tree:
            watches[0].close()
            closed.set()

    watches.append(store.watch(root, once))
    store.add(f"{root}/a", "1")
    assert closed.wait(BOUND_S)
    store.add(f"{root}/b", "2")
    watches[0].close()
    assert next(calls) == 2


def test_failing_callback_is_not_silent(store, root, monkeypatch):
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.put(str(args.exc_value)))

    def fail(tree):
        if tree:
            raise ValueError("broken callback")

    with store.watch(root, fail):
        store.add(f"{root}/a", "1")
        assert failures.get(timeout=BOUND_S) == "broken callback"


def test_closed_store_refuses_and_ends_its_watches(store, root):
    store.watch(root, lambda tree: None)
    store.close()
    store.close()
    with pytest.raises(NameStoreError, match=r"after close"):
        store.get(f"{root}/a")
    assert not [t for t in threading.enumerate() if t.name == f"watch {root}"]

"""The heartbeat against the memory store: each way to lose it, and the order of incarnations."""

import json
import queue

import pytest

from realsys.cluster.lease import Heartbeat, LeaseTerms, lease_clock
from realsys.config.schema_cluster import ClusterConfig, NameStoreConfig
from realsys.errors import Fenced, NameStoreError
from tests.support.ledger.memory_store import MemoryNameStore

BOUND_S = 60.0
KEY = "t/heartbeat/rollout_worker/1"
Losses = queue.SimpleQueue[Fenced]


@pytest.fixture
def store():
    made = MemoryNameStore()
    yield made
    made.close()


def heartbeat(store, losses, lease_s=60.0, **options):
    return Heartbeat(store, KEY, "rollout_worker", 1, LeaseTerms(lease_s, 0.02, **options), losses.put)


@pytest.fixture
def losses():
    return queue.SimpleQueue()


def test_value_has_identity_and_state(store, losses):
    beating = heartbeat(store, losses)
    values: queue.SimpleQueue[dict] = queue.SimpleQueue()
    with store.watch(KEY, lambda tree: values.put(json.loads(tree[KEY]))):
        first = values.get(timeout=BOUND_S)
        assert (first["kind"], first["index"], first["state"]) == ("rollout_worker", 1, "starting")
        assert first["incarnation"] == beating.incarnation
        beating.start()
        beating.set_state("serving")
        assert values.get(timeout=BOUND_S)["state"] == "serving"
        beating.stop()
    assert losses.empty()


def test_incarnations_grow_without_key_and_clock(store, losses, tmp_path):
    last, future = tmp_path / "incarnations" / "rollout_worker-1", 4_000_000_000_000_000_000
    before = heartbeat(store, losses, last=last).incarnation
    assert last.read_text() == before
    store.delete(KEY)
    last.write_text(str(future))  # left by a machine whose clock was ahead
    for step in (1, 2):
        assert heartbeat(store, losses, last=last).incarnation == f"{future + step:019d}"
        store.delete(KEY)
    assert [path.name for path in last.parent.iterdir()] == ["rollout_worker-1"]


def test_unreadable_incarnation_file_is_replaced(store, losses, tmp_path, caplog):
    last = tmp_path / "incarnations" / "rollout_worker-1"
    last.parent.mkdir()
    last.write_bytes(b"")
    made = heartbeat(store, losses, last=last)
    assert f"{last} holds b'', which is not an incarnation" in caplog.text
    assert last.read_text() == made.incarnation


def test_removed_key_means_declared_dead(store, losses):
    beating = heartbeat(store, losses)
    store.delete(KEY)
    beating.start()
    assert "declared dead" in str(losses.get(timeout=BOUND_S))
    beating.stop()
    assert store.get_subtree(KEY) == {}


def test_newer_incarnation_wins_and_the_older_stops(store, losses):
    newer_losses: Losses = queue.SimpleQueue()
    old = heartbeat(store, losses)
    new = heartbeat(store, newer_losses)
    assert new.incarnation > old.incarnation
    with pytest.raises(Fenced):
        old._write(old._value())  # the older one was in the middle of a beat
    new.start()
    old.start()
    assert f"incarnation {int(new.incarnation)}" in str(losses.get(timeout=BOUND_S))
    assert json.loads(store.get(KEY))["incarnation"] == new.incarnation
    old.stop()
    new.stop()
    assert newer_losses.empty()


def test_incarnation_grows_after_clock_was_set_back(store, losses, monkeypatch):
    first = heartbeat(store, losses)
    monkeypatch.setattr("realsys.cluster.lease.time.time_ns", lambda: 5)
    assert heartbeat(store, losses).incarnation > first.incarnation


def test_loss_is_told_once(store, losses):
    beating = heartbeat(store, losses, lease_s=0.05)
    beating.lease.revoke()
    beating.start()
    assert isinstance(losses.get(timeout=BOUND_S), Fenced)
    beating.stop()
    assert losses.empty()


def test_unreachable_store_ends_worker_with_its_lease(store, losses, monkeypatch, caplog):
    now = 100.0
    beating = heartbeat(store, losses, lease_s=60.0, clock=lambda: now)

    tries: queue.SimpleQueue[None] = queue.SimpleQueue()

    def fail(lease):
        tries.put(None)
        raise NameStoreError("etcd at 10.0.0.1:2379 did not answer")

    monkeypatch.setattr(store, "renew_lease", fail)
    beating.start()
    for _ in range(2):  # at the second try, the first has been logged
        tries.get(timeout=BOUND_S)
    assert losses.empty()
    now = 160.0
    with beating._condition:
        beating._condition.notify_all()  # the seconds have passed
    assert "whole lease of 60 s" in str(losses.get(timeout=BOUND_S))
    beating.stop()
    assert "trying again" in caplog.text


def test_foreign_value_under_the_key_is_named(store, losses):
    store.add(KEY, "not json")
    with pytest.raises(NameStoreError, match=f"{KEY} holds 'not json'"):
        heartbeat(store, losses)


def test_check_raises_before_any_thread_has_run(store, losses):
    """After a suspension: the store still treats the process as alive, and no thread of the heartbeat has run yet."""
    now = 100.0
    beating = heartbeat(store, losses, lease_s=60.0, clock=lambda: now)
    now = 159.9
    beating.check()
    assert losses.empty()
    now = 160.0
    for _ in range(2):
        with pytest.raises(Fenced, match="must stop"):
            beating.check()
    assert "whole lease of 60 s" in str(losses.get_nowait())
    assert losses.empty()
    assert store.get(KEY)


def test_good_beat_moves_the_deadline(store, losses):
    now = 100.0
    beating = heartbeat(store, losses, lease_s=60.0, clock=lambda: now)
    now = 150.0
    beating._beat()
    now = 209.9
    beating.check()
    now = 210.0
    with pytest.raises(Fenced):
        beating.check()


def test_suspended_beat_does_not_renew_the_lease(store, losses, monkeypatch):
    """Suspended inside the store's call: its answer is from before, and so is the deadline that it earns."""
    now = 100.0
    beating = heartbeat(store, losses, lease_s=60.0, clock=lambda: now)

    def suspended(lease):
        nonlocal now
        now = 500.0

    monkeypatch.setattr(store, "renew_lease", suspended)
    beating._beat()
    with pytest.raises(Fenced):
        beating.check()


def test_check_raises_once_the_key_was_taken_over(store, losses):
    old, newer_losses = heartbeat(store, losses), queue.SimpleQueue()
    new = heartbeat(store, newer_losses)
    old.start()
    assert "taken over" in str(losses.get(timeout=BOUND_S))
    with pytest.raises(Fenced, match="lost its lease"):
        old.check()
    new.check()
    old.stop()


def test_beat_writes_only_changed_values(store, losses, monkeypatch):
    """Every write wakes all that watch the heartbeats."""
    beating, written = heartbeat(store, losses), []
    monkeypatch.setattr(store, "add", lambda key, value, **_: written.append(json.loads(value)["state"]))
    for state in ("starting", "serving", "serving"):
        beating.set_state(state)
        beating._beat()
    assert written == ["serving"]


def test_counters_are_in_the_next_beat(store, losses):
    beating = heartbeat(store, losses)
    assert json.loads(store.get(KEY))["counters"] == {}
    beating.count(lambda: {"malformed": 3})
    beating._beat()
    assert json.loads(store.get(KEY))["counters"] == {"malformed": 3}


def test_rising_counters_are_written_every_half_minute(store, losses, monkeypatch):
    """A worker that is attacked must not wake the manager with each beat. A state is still written immediately."""
    now, refused, written = 100.0, 0, []
    beating = heartbeat(store, losses, clock=lambda: now)
    beating.count(lambda: {"refused": refused})
    beating._beat()
    add = store.add
    monkeypatch.setattr(store, "add", lambda *args, **options: (written.append(now), add(*args, **options)))
    for seconds in range(2, 64, 2):
        now, refused = 100.0 + seconds, seconds
        beating._beat()
    assert written == [102.0, 132.0, 162.0]
    beating.set_state("serving")
    beating._beat()
    assert written[3:] == [162.0]
    assert json.loads(store.get(KEY))["counters"] == {"refused": 62}


def test_beats_read_the_key_once_per_fifth_of_lease(store, losses, monkeypatch):
    now, read = 100.0, []
    beating = heartbeat(store, losses, lease_s=60.0, clock=lambda: now)
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: (read.append(now), get(key))[1])
    for seconds in (2.0, 4.0, 13.9, 14.0, 16.0):
        now = 100.0 + seconds
        beating._beat()
    assert read == [102.0, 114.0]
    beating.set_state("serving")
    beating._beat()
    assert read[2:] == [116.0]  # a value is never written over that of a successor


def test_suspension_counts_unless_all_is_on_one_machine(monkeypatch):
    """CLOCK_BOOTTIME counts it, and the monotonic clock does not."""
    monkeypatch.setattr("realsys.cluster.lease.time.monotonic", lambda: 1.0)
    monkeypatch.setattr("realsys.cluster.lease.time.clock_gettime", lambda clock: 1000.0)

    def now(nodes, backend, spares=0):
        store = NameStoreConfig.model_validate({"backend": backend})
        return lease_clock(ClusterConfig(nodes=nodes, spare_nodes=spares, name_store=store))()

    assert now(0, "file") == now(1, "file") == 1.0
    assert now(2, "file") == now(1, "file", spares=1) == now(0, "etcd") == 1000.0


def test_successor_is_named_before_it_has_written_its_key(store, losses, tmp_path):
    """It ends the lease of the older process first; a beat may come in between."""
    last = tmp_path / "incarnations" / "rollout_worker-1"
    older = heartbeat(store, losses, last=last)
    successor = int(older.incarnation) + 1
    last.write_text(str(successor))
    store.end_lease_of(KEY)
    older.start()
    assert f"taken over by incarnation {successor}" in str(losses.get(timeout=BOUND_S))
    older.stop()

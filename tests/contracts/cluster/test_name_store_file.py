"""What only the file backend has: processes that share a directory, clocks, a lock."""

import contextlib
import fcntl
import itertools
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from realsys.cluster.names import file_store
from realsys.cluster.names.file_store import FileNameStore
from realsys.errors import Fenced, KeyExists, KeyMissing, NameStoreError


def in_children(count, body):
    """Fork ``count`` children that run ``body(i)`` all at once; their exit codes."""
    gate_reader, gate_writer = os.pipe()
    pids = []
    for i in range(count):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.close(gate_writer)
                os.read(gate_reader, 1)  # until the parent lets go
                code = body(i)
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(gate_writer)
    os.close(gate_reader)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_one_of_many_processes_creates_each_key(tmp_path):
    FileNameStore(tmp_path)

    def race(i):
        store, won = FileNameStore(tmp_path), 0
        for k in range(40):
            try:
                store.add(f"race/{k}", str(i))
                won += 1
            except KeyExists:
                pass
        return won

    assert sum(in_children(6, race)) == 40
    assert len(FileNameStore(tmp_path).get_subtree("race")) == 40


def test_lapsed_key_has_one_new_owner(tmp_path, monkeypatch):
    """Looking and taking over must be one step. The first to look gives the second all chances to look as well."""
    FileNameStore(tmp_path).add("k", "dead", lease=(lease := FileNameStore(tmp_path).lease(30)))
    (tmp_path / "leases" / lease.lease_id).unlink()
    lapsed, second_looked, won = FileNameStore._lapsed, threading.Event(), []
    looks = itertools.count()

    def look(self, held, path):
        answer = lapsed(self, held, path)
        if next(looks) == 0:
            second_looked.wait(0.3)
        second_looked.set()
        return answer

    monkeypatch.setattr(FileNameStore, "_lapsed", look)

    def take_over(name):
        try:
            FileNameStore(tmp_path).add("k", name)
            won.append(name)
        except KeyExists:
            pass

    threads = [threading.Thread(target=take_over, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) == 1 and FileNameStore(tmp_path).get("k") == won[0]


def test_reader_sees_whole_values_during_replacement(tmp_path):
    store = FileNameStore(tmp_path)
    values = {c * 5000 for c in "ab"}
    store.add("k", "a" * 5000)
    done = threading.Event()

    def write():
        while not done.is_set():
            for value in values:
                store.add("k", value, replace=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {store.get("k") for _ in range(500)} <= values
    finally:
        done.set()
        writer.join(60)


def test_key_exists_throughout_a_takeover(tmp_path):
    """A reader finds the old or the new value, never none."""
    store = FileNameStore(tmp_path)
    lease = store.lease(30)
    store.add("k", "0", lease=lease)
    done = threading.Event()

    def succeed():
        current = lease
        try:
            for n in range(1, 60):
                successor = store.lease(30)
                store.add("k", str(n), lease=successor, replace=True)
                current.revoke()
                current = successor
        finally:
            done.set()

    thread = threading.Thread(target=succeed)
    thread.start()
    while not done.is_set():
        store.get("k")
    thread.join(60)
    assert store.get("k") == "59"


def test_keys_stay_below_the_root(tmp_path):
    root = tmp_path / "store"
    store = FileNameStore(root)
    for key in ("..", "../x", "a/../../../x", ".", "./.", "..@value", "%2e%2e/x", "a\0b", "~/x", "C:\\x"):
        store.add(f"t/{key}", "v")
        assert store.get(f"t/{key}") == "v"
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert {p.name for p in root.iterdir()} == {"keys", "leases", "staging", "lock"}
    assert {p.name for p in (root / "keys").iterdir()} == {"t"}
    assert not list((root / "staging").iterdir())


def test_lapsed_leases_and_their_keys_are_tidied_up(tmp_path):
    store = FileNameStore(tmp_path)
    for i in range(5):
        lease = store.lease(30)
        store.add(f"peers/{i}", str(i), lease=lease)
        lease.revoke()
    assert not list((tmp_path / "leases").iterdir())
    assert not list((tmp_path / "keys").rglob("*@value"))


def of_another_host(store, lease_id, count, ttl_s):
    """The lease as a process on another machine would write it: its boot, its clock."""
    record = {"boot": "another", "deadline": time.monotonic() - 1e6, "ttl_s": ttl_s, "count": count}
    (store.root / "leases" / lease_id).write_text(json.dumps(record))


def lives_while_its_counter_moves(folder, ttl_s):
    """False: it could not be seen, as this machine was too slow to move the counter within ``ttl_s``."""
    owner, reader = FileNameStore(folder), FileNameStore(folder)
    lease = owner.lease(30)
    owner.add("k", "v", lease=lease)
    gone = threading.Event()
    moved = time.monotonic()
    of_another_host(owner, lease.lease_id, 0, ttl_s)
    with reader.watch("k", lambda tree: None if tree else gone.set()):
        for count in range(1, 6):
            before, moved = moved, time.monotonic()
            of_another_host(owner, lease.lease_id, count, ttl_s)
            lost = gone.wait(ttl_s / 2)
            if max(moved - before, time.monotonic() - moved) >= ttl_s:
                return False
            assert not lost
        assert gone.wait(60)
        assert time.monotonic() - moved >= ttl_s
    with pytest.raises(KeyMissing):
        reader.get("k")
    return True


def test_foreign_lease_lives_while_its_counter_moves(tmp_path):
    """Its clock means nothing here; it is dead when nothing has moved for one TTL of our own."""
    ttl_s = 0.3
    while not lives_while_its_counter_moves(tmp_path / str(ttl_s), ttl_s):
        ttl_s *= 4


def test_step_of_the_wall_clock_changes_nothing(tmp_path, monkeypatch):
    store = FileNameStore(tmp_path)
    lease = store.lease(30)
    store.add("k", "v", lease=lease)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    lease.keep_alive()
    assert FileNameStore(tmp_path).get("k") == "v"


def test_owner_of_a_removed_lease_is_fenced(tmp_path):
    store = FileNameStore(tmp_path)
    lease = store.lease(30)
    (tmp_path / "leases" / lease.lease_id).unlink()
    with pytest.raises(Fenced, match="lapsed"):
        lease.keep_alive()
    assert not list((tmp_path / "leases").iterdir())


def test_lock_of_a_stopped_process_is_reported(tmp_path, monkeypatch):
    """The error names the lock file and who holds it."""
    monkeypatch.setattr(file_store, "LOCK_TIMEOUT_S", 0.2)
    store = FileNameStore(tmp_path)
    store.add("k", "v")
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            NameStoreError, match=rf"lock was held for 0\.2 s by process {os.getpid()} \(.*python.*SIGSTOP"
        ):
            store.add("k", "w", replace=True)
        assert store.get("k") == "v"
    store.add("k", "w", replace=True)


@pytest.mark.parametrize("content", [b"", b"no newline", b"lease\n\xff"])
def test_damaged_value_is_reported_with_its_file(tmp_path, content):
    store = FileNameStore(tmp_path)
    store.add("k", "v")
    path: Path = tmp_path / "keys" / "k@value"
    path.write_bytes(content)
    with pytest.raises(NameStoreError, match=str(path)):
        store.get("k")


def test_unusable_directory_names_its_field(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NameStoreError, match=r"Not a directory.*cluster\.name_store\.root"):
        FileNameStore(tmp_path / "file" / "store")


class Moves:
    """Renames of the store's directory. It returns when the store calls os.stat."""

    def __init__(self, root, monkeypatch):
        self.root, self.away = root, root.with_name("away")
        stat, read_lease = os.stat, FileNameStore._read_lease

        def look(*arguments, **options):
            self.come_back()
            return stat(*arguments, **options)

        def go_and_read(*arguments):
            self.go()
            return read_lease(*arguments)

        monkeypatch.setattr(os, "stat", look)
        self.go_before_a_lease_is_read = lambda: monkeypatch.setattr(FileNameStore, "_read_lease", go_and_read)

    def go(self):
        os.rename(self.root, self.away)

    def come_back(self):
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.away, self.root)


@pytest.mark.parametrize("look", [FileNameStore.get, FileNameStore.get_subtree, FileNameStore.delete])
def test_returning_directory_is_not_empty(tmp_path, monkeypatch, look):
    store = FileNameStore(tmp_path / "store")
    store.add("k", "v")
    moves = Moves(store.root, monkeypatch)
    moves.go()
    with pytest.raises(NameStoreError, match=rf"in {store.root}: No such file.*check that the directory exists"):
        look(store, "k")
    moves.come_back()
    assert store.get("k") == "v"


@pytest.mark.parametrize("look", [FileNameStore.get, FileNameStore.get_subtree])
def test_moved_directory_keeps_its_leases(tmp_path, monkeypatch, look):
    """The directory goes between the reading of a value and of its lease."""
    store = FileNameStore(tmp_path / "store")
    store.add("k", "v", lease=store.lease(30))
    moves = Moves(store.root, monkeypatch)
    moves.go_before_a_lease_is_read()
    assert look(store, "k") in ("v", {"k": "v"})


def test_owner_in_a_moved_directory_is_not_fenced(tmp_path, monkeypatch):
    store = FileNameStore(tmp_path / "store")
    lease = store.lease(30)
    moves = Moves(store.root, monkeypatch)
    moves.go_before_a_lease_is_read()
    lease.keep_alive()
    moves.come_back()
    (path,) = (store.root / "leases").iterdir()
    assert json.loads(path.read_text())["count"] == 1


def test_watch_continues_after_failed_listings(tmp_path):
    """The watch logs a warning while it cannot list."""
    store = FileNameStore(tmp_path)
    store.add("k", "1")
    warned, recovered = threading.Event(), threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: warned.set()  # type: ignore[method-assign]
    logger = logging.getLogger("realsys.cluster.names.contract")
    logger.addHandler(handler)
    try:
        with store.watch("k", lambda tree: recovered.set() if tree == {"k": "2"} else None):
            (tmp_path / "keys" / "k@value").unlink()
            (tmp_path / "keys" / "k@value").mkdir()  # any error of the file system
            assert warned.wait(60)
            (tmp_path / "keys" / "k@value").rmdir()
            store.add("k", "2", replace=True)
            assert recovered.wait(60)
    finally:
        logger.removeHandler(handler)

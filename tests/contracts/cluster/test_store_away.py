"""Workers and a name store that goes away for a while: shorter than the lease, and longer. Real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realsys.cluster.failure import read_errors
from realsys.cluster.store.connect import make_name_store
from realsys.errors import NameStoreError
from tests.support.processes.tester_trial import Trial

LONG_S = 120.0  # a lease that no slow machine outlives
#: writes the last value that its watch on "asked" delivered to the key "seen"
FOLLOWER = """
    root = ctx.names.root
    watch = ctx.store.watch(root + "/asked", lambda tree: ctx.register(root + "/seen", "".join(tree.values()) or "-"))
    beats = iter(range(1 << 30))
    ctx.count(lambda: {"beats": next(beats)})  # so that a beat can be seen
    quick()
    ctx.stop.wait()
    watch.close()
""".strip()


class Follower:
    """A worker with a watch, and what another process sees of it all the time."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.root = trial, trial.names.root
        self.heartbeat = trial.names.heartbeat("tester/0")
        self.process = trial.start(FOLLOWER)
        trial.ready()
        trial.until(f"{self.root}/seen", lambda tree: "-" in tree.values())
        self.before = json.loads(trial.store.get(self.heartbeat))
        self.missing = 0
        self._watch = trial.store.watch(self.heartbeat, self._look)

    def _look(self, tree: dict[str, str]) -> None:
        self.missing += not tree

    @staticmethod
    def _beats(value: str) -> int:
        return int(json.loads(value)["counters"].get("beats", 0))

    def goes_on(self) -> None:
        """The same incarnation beats, its keys were never gone, and its watch misses nothing."""
        other = make_name_store(self.trial.config, self.trial.paths)
        other.add(f"{self.root}/asked", "now", replace=True)
        other.close()
        self.trial.until(f"{self.root}/seen", lambda tree: "now" in tree.values())
        back = self._beats(self.trial.store.get(self.heartbeat))
        self.trial.until(self.heartbeat, lambda tree: self._beats(tree[self.heartbeat]) > back)
        after = json.loads(self.trial.store.get(self.heartbeat))
        assert (after["incarnation"], after["pid"]) == (self.before["incarnation"], self.process.pid)
        self._watch.close()
        assert self.missing == 0
        self.process.terminate()
        self.trial.ends(self.process, 0)
        assert read_errors(self.trial.paths.errors) == []


@pytest.mark.needs("etcd")
def test_killed_etcd_back_within_the_lease_costs_nothing(tmp_path: Path, own_etcd):
    trial = Trial(tmp_path, lease_s=LONG_S, backend="etcd", address=own_etcd.address)
    try:
        follower = Follower(trial)
        own_etcd.kill()
        trial.logged(follower.process, "heartbeat failed, trying again")
        own_etcd.start()
        follower.goes_on()
    finally:
        trial.close()


@pytest.mark.needs("etcd")
def test_etcd_away_for_a_lease_fences_its_workers(tmp_path: Path, own_etcd):
    trial = Trial(tmp_path, lease_s=3.0, backend="etcd", address=own_etcd.address)
    try:
        process = trial.start("quick(); threading.Event().wait()")
        trial.ready()
        own_etcd.kill()
        log = trial.ends(process, 75)
        assert "trying again" in log
        (record,) = read_errors(trial.paths.errors)
        assert record.type == "Fenced" and "no heartbeat for the whole lease" in record.message
        own_etcd.start()
        trial.gone(trial.names.root)
    finally:
        trial.close()


def test_directory_back_within_the_lease_costs_nothing(tmp_path: Path):
    trial = Trial(tmp_path / "trial", lease_s=LONG_S, backend="file", root=str(tmp_path / "store"))
    try:
        follower = Follower(trial)
        (tmp_path / "store").rename(tmp_path / "away")
        for look in (trial.store.get_subtree, trial.store.get):
            with pytest.raises(NameStoreError, match=r"No such file or directory; check that the directory exists"):
                look(trial.names.root)
        trial.logged(follower.process, "heartbeat failed, trying again")
        (tmp_path / "away").rename(tmp_path / "store")
        follower.goes_on()
    finally:
        trial.close()


def test_directory_away_for_a_lease_fences_its_workers(tmp_path: Path):
    trial = Trial(tmp_path / "trial", lease_s=3.0, backend="file", root=str(tmp_path / "store"))
    try:
        process = trial.start("quick(); threading.Event().wait()")
        trial.ready()
        (tmp_path / "store").rename(tmp_path / "away")
        trial.ends(process, 75)
        (record,) = read_errors(trial.paths.errors)
        assert record.type == "Fenced" and "no heartbeat for the whole lease" in record.message
    finally:
        trial.close()

"""Workers and a name store that goes away for a while: shorter than the lease, and longer. Real processes."""

import pytest

from realsys.cluster.process import read_errors
from realsys.errors import NameStoreError
from tests.support.processes.tester_trial import Follower, Trial

LONG_S = 120.0  # a lease that no slow machine outlives


@pytest.mark.needs("etcd")
def test_killed_etcd_back_within_the_lease_costs_nothing(tmp_path, own_etcd):
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
def test_etcd_away_for_a_lease_fences_its_workers(tmp_path, own_etcd):
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


@pytest.mark.needs("etcd")
def test_worker_starts_when_etcd_is_back(tmp_path, own_etcd):
    trial = Trial(tmp_path, lease_s=LONG_S, backend="etcd", address=own_etcd.address)
    try:
        own_etcd.kill()
        process = trial.start("quick(); ctx.stop.wait()")
        trial.logged(process, "does not answer; trying for 120 s")
        own_etcd.start()
        trial.ready()
        process.terminate()
        trial.ends(process, 0)
    finally:
        trial.close()


def test_directory_back_within_the_lease_costs_nothing(tmp_path):
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


def test_directory_away_for_a_lease_fences_its_workers(tmp_path):
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

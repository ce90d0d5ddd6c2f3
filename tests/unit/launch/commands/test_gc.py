"""`realsys gc`: leftovers of ended trials, with a real etcd; a trial that runs is left alone."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import uuid

import pytest

from realsys.cluster.files import occupy
from realsys.cluster.lease import Heartbeat, LeaseTerms
from realsys.cluster.names import etcd_store
from realsys.cluster.names.connect import make_name_store, trial_names
from realsys.cluster.names.contract import Names
from realsys.cluster.names.etcd_store import EtcdAccess, EtcdNameStore
from realsys.cluster.names.file_store import FileNameStore
from realsys.cluster.process import RUN_ID
from realsys.cluster.stream.sockets import socket_folder
from realsys.config.compose import compose
from realsys.config.paths import TrialPaths, read_config, write_config
from realsys.launch.cli import main
from realsys.launch.commands import gc
from realsys.launch.commands.gc import EndedTrial, Finder, Leftover, remove
from realsys.launch.run import etcd_answers
from realsys.launch.slurm.client import JobState, SlurmError
from realsys.launch.slurm.trial_job import TrialJob
from realsys.launch.trial_folder import TrialLock, claim_keys, remove_keys
from realsys.workers.name_store import ensure_certificate
from tests.support.processes.ports import lasting_ports

LEASE_S = 0.4  # etcd rounds it up to 2 s


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Folder of the trials; shared memory is another folder."""
    (tmp_path / "shm").mkdir()
    init = Finder.__init__
    monkeypatch.setattr(Finder, "__init__", lambda self, folder, say: init(self, folder, say, [tmp_path / "shm"]))
    return tmp_path / "runs"


@pytest.fixture
def etcd(etcd_server, monkeypatch):
    # The short leases of these trials must not bound the calls of a busy etcd.
    monkeypatch.setattr(
        etcd_store, "EtcdNameStore", lambda at, _, __, access, **how: EtcdNameStore(at, 60.0, 60.0, access, **how)
    )
    store = EtcdNameStore(etcd_server.address, call_timeout_s=60.0)
    store.clear_subtree("realsys")  # keys that other tests have left
    yield store
    store.close()


def make(root, *overrides, trial="t"):
    """A trial that has ended, as its launcher made it."""
    given = [f"fileroot={root}", f"cluster.lease_s={LEASE_S}", "cluster.heartbeat_s=0.1", f"trial={trial}", *overrides]
    config = compose(["experiment=arith", *given])
    paths = TrialPaths.of(config)
    paths.root.mkdir(parents=True)
    paths.lock.touch()
    write_config(config, paths.config)
    return config, paths


def on_etcd(root, server, trial):
    return make(root, "name_store=etcd", f"cluster.name_store.address={server.address}", trial=trial)


def unique():
    return f"t{uuid.uuid4().hex[:12]}"


def worker(store, names):
    key = names.heartbeat("rollout_worker/0")
    return Heartbeat(store, key, "rollout_worker", 0, LeaseTerms(LEASE_S, 0.1), lambda error: None)


@pytest.mark.needs("etcd")
def test_end_removes_keys_of_dead_workers(root, etcd, etcd_server):
    config, paths = on_etcd(root, etcd_server, unique())
    claim_keys(config, paths, print)
    names = trial_names(config)
    worker(etcd, names)  # killed: its lease has not lapsed
    etcd.add(names.model_version(), "{}")
    assert json.loads(etcd.get(names.folder))["path"] == str(paths.root)
    remove_keys(config, paths, print)
    assert etcd.get_subtree(names.root) == {}


def test_end_with_unreachable_store_names_the_remedy(root, monkeypatch):
    monkeypatch.setattr("realsys.launch.trial_folder._END_S", 0.1)
    config, paths = make(root, "name_store=etcd", "cluster.name_store.address=127.0.0.1:1")
    said: list[str] = []
    remove_keys(config, paths, said.append)
    assert len(said) == 1 and f"realsys gc {paths.root}" in said[0]


@pytest.mark.needs("etcd")
def test_gc_lists_then_removes(root, etcd, etcd_server, capsys):
    config, paths = on_etcd(root, etcd_server, unique())
    names = trial_names(config)
    claim_keys(config, paths, print)
    worker(etcd, names)  # killed
    half = paths.checkpoints / "step-00000003.tmp"
    half.mkdir(parents=True)
    (half / "part").write_bytes(b"x" * 500_000)
    kept = paths.checkpoints / "step-00000002"
    kept.mkdir()
    assert main(["gc", str(root)]) == 0
    listed = capsys.readouterr().out
    assert f"keys below {names.root}/: 1" in listed and f"{half} (0.5 MB)" in listed and "--yes" in listed
    assert half.exists() and etcd.get(names.folder)
    assert main(["gc", str(root), "--yes"]) == 0
    assert "removed 2 leftovers" in capsys.readouterr().out
    assert not half.exists() and kept.exists() and paths.config.exists()
    assert etcd.get_subtree(names.root) == {}
    assert main(["gc", str(paths.root)]) == 0
    assert "nothing is left over" in capsys.readouterr().out


@pytest.mark.needs("etcd")
def test_trial_with_a_living_worker_is_left_alone(root, etcd, etcd_server, capsys):
    """Its workers are on other machines, so nobody holds the lock here."""
    config, paths = on_etcd(root, etcd_server, unique())
    claim_keys(config, paths, print)
    beating = worker(etcd, trial_names(config))
    beating.start()
    (paths.root / "config.json.tmp").touch()
    try:
        assert main(["gc", str(root), "--yes"]) == 0
    finally:
        beating.stop()
    assert "left alone: it runs: " in capsys.readouterr().out
    assert (paths.root / "config.json.tmp").exists()
    assert len(etcd.get_subtree(trial_names(config).root)) == 2


@pytest.mark.needs("etcd")
def test_keys_without_a_folder_are_found(root, etcd, etcd_server, capsys):
    """The folder of one trial was removed; that of another one is on another machine."""
    on_etcd(root, etcd_server, unique())
    gone, paths = on_etcd(root.with_name("other"), etcd_server, unique())
    claim_keys(gone, paths, print)
    paths.config.unlink()
    paths.lock.unlink()
    paths.root.rmdir()
    elsewhere = Names(trial_names(gone).user, "arith", unique())
    etcd.add(elsewhere.folder, '{"host": "node7", "path": "/scratch/t"}')
    assert main(["gc", str(root), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"keys below {trial_names(gone).root}/: 1" in out
    assert f"{elsewhere.root}/: left alone: its folder is not on this machine" in out
    assert etcd.get_subtree(trial_names(gone).root) == {}
    assert etcd.get(elsewhere.folder)
    etcd.clear_subtree(elsewhere.root)


def test_locked_trial_is_left_alone(root, capsys):
    _, paths = make(root)
    (paths.root / "x.tmp").touch()
    with paths.lock.open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["gc", str(paths.root), "--yes"]) == 0
        assert "its lock is held" in capsys.readouterr().out
        assert remove(EndedTrial("t", paths, leftovers=[Leftover("x", 0, (paths.root / "x.tmp").unlink)])) != []
    assert (paths.root / "x.tmp").exists()


def test_trial_with_unreachable_etcd_is_left_alone(root, monkeypatch, capsys):
    monkeypatch.setattr(gc, "_ANSWER_S", 0.1)
    _, paths = make(root, "name_store=etcd", "cluster.name_store.address=127.0.0.1:1")
    (paths.root / "x.tmp").touch()
    assert main(["gc", str(root), "--yes"]) == 0
    assert "it may run: name store: cannot" in capsys.readouterr().out
    assert (paths.root / "x.tmp").exists()


OWN_ETCD = ("name_store=etcd", "cluster.name_store.start=true", "cluster.nodes=2")


def on_own_etcd(root, trial, address="127.0.0.1:1", *overrides):
    """A trial over nodes whose etcd is at ``address``, with a folder that its run would use."""
    _, paths = make(root, *OWN_ETCD, *overrides, trial=trial)
    paths.store_address.write_text(address)
    paths.own_etcd.mkdir()
    ensure_certificate(paths.etcd_certificate, "127.0.0.1")
    return paths


@pytest.fixture
def slurm(monkeypatch):
    """Jobs that SLURM knows."""
    jobs: dict[str, JobState] = {}
    monkeypatch.setattr(gc, "job_state", jobs.get)
    return jobs


@pytest.mark.processes
@pytest.mark.needs("etcd")
def test_each_own_etcd_is_asked(root, capsys):
    """Both have the default address in their configuration. The etcd of the first one has ended."""
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    ended, living = on_own_etcd(root, "a"), on_own_etcd(root, "b", address)
    ended.summary.write_text("{}")
    argv = [sys.executable, "-m", "realsys.workers.name_store", "--trial-dir", str(living.root), "--index", "0"]
    with subprocess.Popen(argv, env={**os.environ, RUN_ID: "b-1"}) as etcd:
        try:
            asyncio.run(etcd_answers(address, EtcdAccess.by_one_file(living.etcd_certificate), "b-1", 60.0))
            config = read_config(living.config)
            store = make_name_store(config, living)
            beating = worker(store, trial_names(config))
            beating.start()
            assert main(["gc", str(root), "--yes"]) == 0
            beating.stop()
            store.close()
        finally:
            etcd.terminate()
    assert f"{living.root}: left alone: it runs: " in capsys.readouterr().out
    assert living.own_etcd.exists() and not ended.own_etcd.exists()


def test_silent_own_etcd_without_summary_is_doubt(root, capsys):
    """It may be out of reach from here, and the lock may be local to another host."""
    paths, unknown = on_own_etcd(root, "a"), on_own_etcd(root, "b")
    unknown.store_address.unlink()
    paths.summary.write_text("{}")
    os.utime(paths.summary, (1, 1))  # an earlier run wrote it
    assert main(["gc", str(root), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"{paths.root}: left alone: it may run: name store: cannot" in out and "machine of its launcher" in out
    assert f"{unknown.root}: left alone: it may run: its etcd has not told its address, or has no certificate" in out
    assert paths.own_etcd.exists() and unknown.own_etcd.exists()


def test_killed_launcher_of_this_machine_has_ended(root):
    paths = on_own_etcd(root, "a")
    lock = TrialLock(paths.lock, "a", retry_timeout_s=0.0)
    lock.sign()
    lock.close()
    assert main(["gc", str(root), "--yes"]) == 0
    assert not paths.own_etcd.exists()


def test_trial_with_a_living_job_is_left_alone(root, slurm, capsys):
    """The second one waits, and its folder has only what its submission wrote."""
    running, waiting = on_own_etcd(root, "a", "127.0.0.1:1", "cluster.launcher=slurm"), TrialPaths(root / "arith" / "b")
    for paths, job in ((running, "7"), (waiting, "8")):
        paths.job.parent.mkdir(parents=True)
        paths.lock.touch()
        TrialJob.write(paths, job)
    slurm |= {"7": JobState("RUNNING", host="n1"), "8": JobState("PENDING", "Resources")}
    assert main(["gc", str(root), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"{running.root}: left alone: job 7 is running on n1" in out
    assert f"{waiting.root}: left alone: job 8 is pending, Resources" in out
    assert running.own_etcd.exists() and waiting.job.exists()
    slurm["7"] = JobState("FAILED")
    assert main(["gc", str(running.root), "--yes"]) == 0
    assert not running.own_etcd.exists()


def test_job_is_doubt_where_slurm_is_silent(root, slurm, monkeypatch, capsys):
    asked: list[str] = []

    def silent(job):
        asked.append(job)
        raise SlurmError("there is no program named scontrol")

    monkeypatch.setattr(gc, "job_state", silent)
    doubtful, ended, damaged = (on_own_etcd(root, name, "127.0.0.1:1", "cluster.launcher=slurm") for name in "abc")
    for paths in (doubtful, ended, damaged):
        paths.job.parent.mkdir()
        TrialJob.write(paths, "7")
    ended.summary.write_text("{}")
    damaged.job.write_text("{")
    assert main(["gc", str(root), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"{doubtful.root}: left alone: its job may live: there is no program named scontrol" in out
    assert f"{damaged.root}: left alone: it may run: config: job.json=" in out
    assert doubtful.own_etcd.exists() and damaged.own_etcd.exists() and not ended.own_etcd.exists()
    assert asked == ["7"]


@pytest.mark.needs("etcd")
def test_keys_of_a_living_job_elsewhere_stay(root, slurm, etcd, etcd_server, capsys):
    on_etcd(root, etcd_server, unique())
    config, paths = on_etcd(root.with_name("other"), etcd_server, unique())
    claim_keys(config, paths, print)
    paths.job.parent.mkdir()
    TrialJob.write(paths, "7")
    slurm["7"] = JobState("RUNNING", host="n1")
    assert main(["gc", str(root), "--yes"]) == 0
    assert f"{paths.root}: job 7 is running on n1" in capsys.readouterr().out
    assert etcd.get(trial_names(config).folder)
    etcd.clear_subtree(trial_names(config).root)


def test_stores_in_trial_folder_are_removed(root):
    config, paths = make(root)
    store = FileNameStore(paths.name_store)
    worker(store, trial_names(config))  # killed
    store.close()
    (paths.own_etcd / "data").mkdir(parents=True)
    assert main(["gc", str(root), "--yes"]) == 0
    assert not paths.name_store.exists() and not paths.own_etcd.exists()


def test_unfinished_trial_is_removed_but_never_trained_ones(root):
    unfinished, trained = root / "arith" / "a", root / "arith" / "b"
    for folder in (unfinished, trained):
        (folder / "data").mkdir(parents=True)
        (folder / "lock").touch()
    (trained / "checkpoints").mkdir()  # a user has lost its config.json
    assert main(["gc", str(root), "--yes"]) == 0
    assert not unfinished.exists() and trained.exists()


def test_old_weight_versions_go_and_the_newest_stays(root, monkeypatch):
    _, paths = make(root)
    versions = [paths.weights() / f"v{number:08d}.{1:019d}" for number in range(3)]
    for version in versions:
        version.mkdir(parents=True)
    monkeypatch.setattr(gc, "superfluous", lambda role, keep: (versions[:-keep], {}))
    assert main(["gc", str(root), "--yes"]) == 0
    assert [version.exists() for version in versions] == [False, False, True]


def test_only_unlocked_folders_in_shared_memory_go(root):
    root.mkdir()
    dead, alive, foreign = (root.parent / "shm" / f"realsys-{name}" for name in ("sglang-1", "weights-2", "other"))
    for folder in (dead, alive, foreign):
        folder.mkdir()
    os.close(occupy(dead))
    held = occupy(alive)
    assert main(["gc", str(root), "--yes"]) == 0
    os.close(held)
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_only_sockets_without_a_process_go(root):
    """A killed process leaves its file; a stream that was just bound may not listen yet."""
    root.mkdir()
    folder = socket_folder(root.parent / "shm")
    folder.mkdir(mode=0o700)
    dead, alive, new = (folder / f"{pid}-a" for pid in (1, 2, 3))
    sockets = {path: socket.socket(socket.AF_UNIX) for path in (dead, alive, new)}
    for path, each in sockets.items():
        each.bind(str(path))
        os.utime(path, (0, 0) if path != new else None)
    sockets[alive].listen()
    sockets[dead].close()
    assert main(["gc", str(root), "--yes"]) == 0
    assert (dead.exists(), alive.exists(), new.exists()) == (False, True, True)
    for each in sockets.values():
        each.close()


def test_missing_folder_is_bad_input(tmp_path, capsys):
    assert main(["gc", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err

"""How a trial starts: a pure decision over what was read from the disk."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import ConfigError
from realsys.launch.slurm.client import JobState
from realsys.launch.slurm.trial_job import TrialJob, describe_job, trial_state, trials_in
from realsys.launch.start import StoredTrial, _read_ledger, decide_start, describe, newer_data
from realsys.launch.trial_folder import TrialLock, running_launcher
from realsys.manager.ledger.events import Resumed, RolledBack, Trained
from realsys.manager.ledger.journal import Journal
from realsys.manager.messages import DataPosition
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RoleState
from realsys.train.master.recovery import TrainingStart, TrialStart, read_start, write_start

CONFIG = Config(trial="t")
STATE = CheckpointState(
    5, 5, 1, 512, DataPosition(9, [], 20, 1), {"actor": RoleState({}, "adam", "d1p1m1")}, {}, "", 0.0
)
OWN, OTHER = Path("/runs/t/checkpoints/step-00000005"), Path("/runs/other/checkpoints/step-00000005")
RESUMING = CONFIG.model_copy(update={"resume": str(OTHER)})


@pytest.mark.parametrize(
    ("config", "trial", "start", "line"),
    [
        (CONFIG, StoredTrial(), TrialStart(kind="new"), ""),
        (
            RESUMING,
            StoredTrial(begin=TrainingStart(OTHER, 5), state=STATE),
            TrialStart(kind="resumed", checkpoint=str(OTHER), step=5),
            f"continuing at step 5 from {OTHER}",
        ),
        (
            RESUMING,
            StoredTrial(config=RESUMING, begin=TrainingStart(OTHER, 5), state=STATE, steps=1),
            TrialStart(kind="resumed", checkpoint=str(OTHER), step=5, trained=1),
            f"continuing at step 5 from {OTHER}",
        ),
        (
            RESUMING,
            StoredTrial(
                config=RESUMING, begin=TrainingStart(OWN, 5, own=True), state=STATE, steps=7, has_ledger=True, newest=5
            ),
            TrialStart(kind="recovered", checkpoint=str(OWN), step=5, trained=7),
            "continuing from step-00000005; 7 steps had been trained",
        ),
        (
            CONFIG,
            StoredTrial(config=CONFIG, steps=2),
            TrialStart(kind="recovered", trained=2),
            "starting again from the beginning: there is no complete checkpoint yet",
        ),
    ],
    ids=["new", "resumed", "resumed again", "recovered", "recovered without checkpoint"],
)
def test_start_follows_from_the_disk(config, trial, start, line, tmp_path):
    decided = decide_start(config, trial)
    assert decided == start and "\n".join(describe(decided)) == line
    assert decided.resumed_from == (str(OTHER) if start.kind == "resumed" else "")
    write_start(decided, tmp_path / "start.json")
    assert read_start(tmp_path / "start.json") == decided


def test_changed_settings_are_listed():
    other = CONFIG.model_copy(update={"allocation": "serve.d1+d2"})
    assert list(describe(decide_start(other, StoredTrial(config=CONFIG))))[1:] == [
        "changed: allocation='serve.d1+d2' (was 'serve.d1p1m1+d1p1m1')"
    ]


def test_checkpoints_without_a_ledger_are_refused():
    with pytest.raises(ConfigError, match=r"no ledger.jsonl.*: restore it from a copy, or start a new trial with"):
        decide_start(CONFIG, StoredTrial(config=CONFIG, begin=TrainingStart(OWN, 5, own=True), state=STATE))


def ledger_of(path, *versions):
    with Journal(path) as journal:
        for version in versions:
            journal.append([Trained(version, version, [], 0.0)])


@pytest.mark.parametrize("kept", [0, 4])
def test_ledger_that_ends_before_the_checkpoint_is_refused(tmp_path, kept):
    """By the files alone: before, the manager refused it when all workers had started."""
    paths = TrialPaths(tmp_path)
    ledger_of(paths.ledger, *range(1, 6))
    begin = TrainingStart(OWN, 5, own=True)
    assert _read_ledger(CONFIG, paths) == (None, 5)
    decide_start(CONFIG, StoredTrial(config=CONFIG, begin=begin, state=STATE, has_ledger=True, newest=5))
    lines = paths.ledger.read_bytes().splitlines(keepends=True)
    paths.ledger.write_bytes(b"".join(lines[:kept]))
    _, newest = _read_ledger(CONFIG, paths)
    with pytest.raises(
        ConfigError, match=rf"ledger.jsonl ends at version {kept}, before \S*/step-00000005: restore it"
    ):
        decide_start(CONFIG, StoredTrial(config=CONFIG, begin=begin, state=STATE, has_ledger=True, newest=newest))


@pytest.mark.parametrize(
    ("events", "newest"),
    [
        ([Resumed("other/step-5", 5, 5, 20, [], 0.0)], 5),
        ([Trained(3, 3, [], 0.0), RolledBack(2, 2, "b", "", 0.0)], 2),
        ([Trained(3, 3, [], 0.0), RolledBack(-1, 0, "b", "", 0.0), Trained(1, 1, [], 0.0)], 1),
    ],
)
def test_newest_version_follows_roll_backs(tmp_path, events, newest):
    paths = TrialPaths(tmp_path)
    with Journal(paths.ledger) as journal:
        journal.append(events)
    assert _read_ledger(CONFIG, paths)[1] == newest


def test_unreadable_decision_names_the_file(tmp_path):
    path = tmp_path / "start.json"
    with pytest.raises(ConfigError, match=r"start.json.*No such file or directory; run the same"):
        read_start(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_start(path)


def test_prompts_changed_after_last_start_are_named(tmp_path):
    """As many as before, in another order perhaps: the ledger would take them for the old ones."""
    paths, train = TrialPaths(tmp_path), tmp_path / "train.jsonl"
    data = {"kind": "jsonl", "train": str(train), "eval": str(tmp_path / "none.jsonl")}
    config = Config.model_validate({"data": data})
    for path in (train, paths.config):
        path.touch()
    os.utime(train, (1.0, 1.0))
    assert list(newer_data(config, paths)) == []
    os.utime(paths.config, (0.5, 0.5))
    [line] = newer_data(config, paths)
    assert line.startswith("data.train was written after the last start") and str(train) in line
    assert list(newer_data(config.model_copy(update={"data": Config().data}), paths)) == []


# ---- Who holds a trial's lock, and what is said when it cannot be had


BOUND_S = 60.0


def refusal(path, retry_timeout_s=0.0):
    with pytest.raises(ConfigError) as caught:
        TrialLock(path, "t", retry_timeout_s=retry_timeout_s)
    text = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in text and text.startswith("config: trial='t': ")
    return text


@pytest.fixture
def held(tmp_path):
    """A lock that another process has inherited, and nobody has signed."""
    path = tmp_path / "lock"
    lock = TrialLock(path, "t", retry_timeout_s=0.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    lock.close()
    yield path
    process.communicate(b"\n", BOUND_S)
    TrialLock(path, "t", retry_timeout_s=BOUND_S).close()


def signature_of(pid, shift=0):
    """As a launcher of this pid would sign, or one that began ``shift`` clock ticks later."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{pid} {started + shift} {boot} here\n"


def test_who_signed_is_named(tmp_path):
    lock = TrialLock(tmp_path / "lock", "t", retry_timeout_s=0.0)
    assert running_launcher(tmp_path / "lock") is None, "not before it has signed"
    lock.sign()
    assert (tmp_path / "lock").read_text() == signature_of(os.getpid()).replace("here", os.uname().nodename)
    assert running_launcher(tmp_path / "lock") == os.getpid()
    assert f"is run by another launcher, pid {os.getpid()}" in refusal(tmp_path / "lock")
    lock.close()
    assert running_launcher(tmp_path / "lock") is None, "the signature stays, the lock does not"
    TrialLock(tmp_path / "lock", "t", retry_timeout_s=0.0).close()


@pytest.mark.processes
@pytest.mark.parametrize("shift", [1, -500, None])
def test_process_with_reused_launcher_pid_is_not_blamed(held, shift):
    held.write_text(f"{os.getpid()}\n" if shift is None else signature_of(os.getpid(), shift))
    assert running_launcher(held) is None
    assert "is run by another launcher" not in refusal(held)


@pytest.mark.processes
def test_zombie_launcher_counts_as_dead(held):
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held.write_text(signature_of(dead.pid))
    assert running_launcher(held) == dead.pid
    dead.stdin.close()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert running_launcher(held) is None
    dead.wait(BOUND_S)


@pytest.mark.processes
def test_only_processes_that_hold_the_lock_are_named(held):
    """Processes that wait for the lock are not named."""
    waiting = os.open(held, os.O_RDWR)
    text = refusal(held)
    os.close(waiting)
    assert f"{held} is still held by processes of its last run, or a launcher that is starting (pid " in text
    named = text.rpartition("(pid ")[2].partition(")")[0].split(", ")
    assert len(named) == 1 and named != [str(os.getpid())]


@pytest.mark.processes
def test_holder_that_opens_and_closes_files_is_named(tmp_path):
    """A file that it closes while its files are listed does not hide the lock."""
    path = tmp_path / "lock"
    lock = TrialLock(path, "t", retry_timeout_s=0.0)
    busy = "import os\nwhile True: os.close(os.open('/dev/null', os.O_RDONLY))"
    process = subprocess.Popen([sys.executable, "-c", busy], pass_fds=[lock.fd])
    lock.close()
    try:
        assert all(f"(pid {process.pid})" in refusal(path) for _ in range(200))
    finally:
        process.kill()
        process.wait(BOUND_S)


@pytest.mark.processes
def test_what_is_waited_for_is_said(held):
    said: list[str] = []
    with pytest.raises(ConfigError):
        TrialLock(held, "t", retry_timeout_s=1.0, say=said.append)
    assert len(said) == 1 and said[0].startswith("waiting up to 1 s for processes of its last run")


def test_the_wait_ends_when_the_last_holder_has(tmp_path):
    first = TrialLock(tmp_path / "lock", "t", retry_timeout_s=0.0)

    def let_go(text):
        threading.Thread(target=first.close).start()

    TrialLock(tmp_path / "lock", "t", retry_timeout_s=BOUND_S, say=let_go).close()


def test_missing_folder_error_says_what_to_do(tmp_path):
    text = refusal(tmp_path / "none" / "lock")
    assert f"{tmp_path}/none/lock cannot be opened for writing: No such file or directory" in text
    assert "another fileroot" in text


def test_file_system_without_locks_says_what_to_do(tmp_path, monkeypatch):
    def no_locks(fd, operation):  # what NFS without lockd answers; no local file system does
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    text = refusal(tmp_path / "lock")
    assert f"{tmp_path}/lock cannot be locked: No locks available" in text and "flock" in text
    assert running_launcher(tmp_path / "lock") is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_full_disk_is_named_when_signing_the_lock():
    lock = TrialLock(Path("/dev/full"), "t", retry_timeout_s=0.0)
    with pytest.raises(ConfigError, match="trial='t': /dev/full cannot be written: ") as caught:
        lock.sign()
    lock.close()
    assert caught.value.exit_code == 2


# ---- State of a trial as its folder tells it


def trial(folder, name="a"):
    paths = TrialPaths(folder / "math" / name)
    paths.job.parent.mkdir(parents=True)
    return paths


def test_job_is_read_as_written(tmp_path):
    paths = trial(tmp_path)
    assert TrialJob.read(paths) is None
    TrialJob.write(paths, "12")
    record = TrialJob.read(paths)
    assert record is not None and record.job == "12"


def test_damaged_job_file_is_one_line(tmp_path):
    paths = trial(tmp_path)
    paths.job.write_text("{")
    with pytest.raises(ConfigError, match="job.json"):
        TrialJob.read(paths)


def test_state_comes_from_job_lock_and_summary(tmp_path):
    paths = trial(tmp_path)
    assert trial_state(paths, None) == "not started"
    assert trial_state(paths, JobState("PENDING")) == "pending"
    assert trial_state(paths, JobState("CANCELLED")) == "cancelled"
    paths.config.write_text("{}")
    assert trial_state(paths, None) == "killed"
    lock = TrialLock(paths.lock, "a", retry_timeout_s=0.0)
    assert trial_state(paths, None) == "running"
    lock.close()
    paths.summary.write_text('{"status": "done"}')
    assert trial_state(paths, JobState("COMPLETED")) == "done"
    paths.summary.write_text("[")
    assert trial_state(paths, None) == "unreadable"


def test_newest_trial_comes_first(tmp_path):
    for age, name in enumerate(("new", "old")):
        paths = trial(tmp_path, name)
        TrialJob.write(paths, "1")
        os.utime(paths.job, (1000 - age, 1000 - age))
    (tmp_path / "math" / "other").mkdir()
    assert [paths.root.name for paths in trials_in(tmp_path)] == ["new", "old"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "job 7 has ended"),
        (JobState("PENDING", "Resources"), "job 7 is pending, Resources"),
        (JobState("RUNNING", "None", "a1"), "job 7 is running on a1"),
        (JobState("FAILED", "NonZeroExitCode", "a1"), "job 7 is failed"),
    ],
)
def test_state_of_a_job_in_words(state, text):
    assert describe_job("7", state) == text

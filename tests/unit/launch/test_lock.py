"""Who holds a trial's lock, and what is said when it cannot be had."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.errors import ConfigError
from realsys.launch.trial_folder import TrialLock, running_launcher

BOUND_S = 60.0


def refusal(path: Path, retry_timeout_s: float = 0.0) -> str:
    with pytest.raises(ConfigError) as caught:
        TrialLock(path, "t", retry_timeout_s=retry_timeout_s)
    text = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in text and text.startswith("config: trial='t': ")
    return text


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A lock that another process has inherited, and nobody has signed."""
    path = tmp_path / "lock"
    lock = TrialLock(path, "t", retry_timeout_s=0.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    lock.close()
    yield path
    process.communicate(b"\n", BOUND_S)
    TrialLock(path, "t", retry_timeout_s=BOUND_S).close()


def signature_of(pid: int, shift: int = 0) -> str:
    """As a launcher of this pid would sign, or one that began ``shift`` clock ticks later."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{pid} {started + shift} {boot} here\n"


def test_who_signed_is_named(tmp_path: Path) -> None:
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
def test_process_with_reused_launcher_pid_is_not_blamed(held: Path, shift: int | None) -> None:
    held.write_text(f"{os.getpid()}\n" if shift is None else signature_of(os.getpid(), shift))
    assert running_launcher(held) is None
    assert "is run by another launcher" not in refusal(held)


@pytest.mark.processes
def test_zombie_launcher_counts_as_dead(held: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held.write_text(signature_of(dead.pid))
    assert running_launcher(held) == dead.pid
    assert dead.stdin is not None
    dead.stdin.close()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert running_launcher(held) is None
    dead.wait(BOUND_S)


@pytest.mark.processes
def test_only_processes_that_hold_the_lock_are_named(held: Path) -> None:
    """Processes that wait for the lock are not named."""
    waiting = os.open(held, os.O_RDWR)
    text = refusal(held)
    os.close(waiting)
    assert f"{held} is still held by processes of its last run, or a launcher that is starting (pid " in text
    named = text.rpartition("(pid ")[2].partition(")")[0].split(", ")
    assert len(named) == 1 and named != [str(os.getpid())]


@pytest.mark.processes
def test_holder_that_opens_and_closes_files_is_named(tmp_path: Path) -> None:
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
def test_what_is_waited_for_is_said(held: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError):
        TrialLock(held, "t", retry_timeout_s=1.0, say=said.append)
    assert len(said) == 1 and said[0].startswith("waiting up to 1 s for processes of its last run")


def test_the_wait_ends_when_the_last_holder_has(tmp_path: Path) -> None:
    first = TrialLock(tmp_path / "lock", "t", retry_timeout_s=0.0)

    def let_go(text: str) -> None:
        threading.Thread(target=first.close).start()

    TrialLock(tmp_path / "lock", "t", retry_timeout_s=BOUND_S, say=let_go).close()


def test_missing_folder_error_says_what_to_do(tmp_path: Path) -> None:
    text = refusal(tmp_path / "none" / "lock")
    assert f"{tmp_path}/none/lock cannot be opened for writing: No such file or directory" in text
    assert "another fileroot" in text


def test_file_system_without_locks_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:  # what NFS without lockd answers; no local file system does
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    text = refusal(tmp_path / "lock")
    assert f"{tmp_path}/lock cannot be locked: No locks available" in text and "flock" in text
    assert running_launcher(tmp_path / "lock") is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_full_disk_is_named_when_signing_the_lock() -> None:
    lock = TrialLock(Path("/dev/full"), "t", retry_timeout_s=0.0)
    with pytest.raises(ConfigError, match="trial='t': /dev/full cannot be written: ") as caught:
        lock.sign()
    lock.close()
    assert caught.value.exit_code == 2

"""Fixtures for the whole suite: a real etcd, and the proof that no test leaves anything running.

``@pytest.mark.needs("etcd")`` skips where the program is not installed. With REALSYS_NO_SKIPS=1 (a machine that is
meant to have everything) it fails there instead. Every test is checked for child processes and threads that it
started and did not end; at the end of the session, also for grandchildren that lost their parents (found by a mark in
their environment).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.errors import NameStoreError
from tests.support.processes.ports import lasting_ports

SETTLE_S = 10.0  # what ends by itself within this is no leftover
SESSION_MARK = "REALSYS_TEST_SESSION"
_shared_servers: set[int] = set()  # pids that belong to session fixtures, which may start in the middle of a test
# multiprocessing keeps these for the life of the interpreter, by design
STANDING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# ---- needs(...)


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = [m.args[0] for m in item.iter_markers("needs") if shutil.which(m.args[0]) is None]
    if not missing:
        return
    reason = f"needs {', '.join(missing)}, which is not installed"
    if os.environ.get("REALSYS_NO_SKIPS") == "1":
        pytest.fail(f"{reason} (REALSYS_NO_SKIPS=1)", pytrace=False)
    pytest.skip(reason)


# ---- a real etcd


class EtcdServer:
    """One etcd member on loopback; data in ``folder``, so that a restart finds it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client_port, self._peer_port = lasting_ports(2)
        self.address = f"127.0.0.1:{self._client_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """The pid, once it answers."""
        client, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        log = self._folder / "etcd.log"
        command = ["etcd", "--name=n0", f"--data-dir={self._folder / 'data'}", f"--initial-cluster=n0={peer}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += ["--logger=zap", "--log-level=warn", f"--log-outputs={log}", "--unsafe-no-fsync"]
        # Short elections: etcd grants no lease shorter than one and a half of them.
        command += ["--heartbeat-interval=50", "--election-timeout=500"]
        from realsys.cluster.store.etcd_store import EtcdNameStore  # grpc: not into sessions that fork and need no etcd

        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        probe = EtcdNameStore(self.address, call_timeout_s=60.0)
        try:
            probe.get_subtree("probe")
        except NameStoreError as exc:
            self.kill()
            pytest.fail(f"etcd did not start: {exc}\n{log.read_text() if log.exists() else ''}")
        finally:
            probe.close()
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: the server gets no chance to say good-bye."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "etcd does not run"
        self._process.send_signal(number)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Shared by all tests; use keys of your own, and do not stop it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    _shared_servers.add(server.start())
    yield server
    server.kill()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """For one test, which may kill and restart it."""
    folder = tmp_path / "etcd"
    folder.mkdir()
    server = EtcdServer(folder)
    server.start()
    yield server
    server.kill()


# ---- nothing left behind


@pytest.fixture(autouse=True)
def leaves_nothing_running() -> Iterator[None]:
    """Fails the test that leaves a child process or a thread. Wider fixtures start before this and are not blamed."""
    children, threads = _children(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + SETTLE_S
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [f"thread {t.name!r}" for t in set(threading.enumerate()) - threads]
    left += [f"process {pid} ({_command(pid)})" for pid in _lasting(_children() - children - _shared_servers, deadline)]
    if left:
        pytest.fail("left running: " + ", ".join(left), pytrace=False)


def _is_worker(session: pytest.Session) -> bool:
    """One of several processes of pytest-xdist, among which a session divides its tests."""
    return hasattr(session.config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that started this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else nothing that a test starts could be interrupted
    if not _is_worker(session):  # who has inherited the session's
        os.environ[SESSION_MARK] = uuid.uuid4().hex


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last to do: xdist has ended its workers by now."""
    if _is_worker(session):
        return
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}".encode()
    left = _lasting({pid for pid in _all_processes() if _has_environment(pid, mark)}, time.monotonic() + SETTLE_S)
    if left:
        print("\nleft running by this session: " + ", ".join(f"{pid} ({_command(pid)})" for pid in left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _children() -> set[int]:
    """Direct children, without those that have ended."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:  # the thread has ended meanwhile
            continue
    return {pid for pid in found if _runs(pid)}


def _all_processes() -> set[int]:
    """All but this one. Its own /proc/self/environ does not show the mark, which was set after it started."""
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()}


def _has_environment(pid: int, entry: bytes) -> bool:
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _runs(pid: int) -> bool:
    """Alive, not a zombie, and not one that stays by design."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX" and not any(name in _command(pid) for name in STANDING_PROCESSES)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "ended"


def _lasting(pids: set[int], deadline: float) -> list[int]:
    """Those that are still there at the deadline. They are not our Popen objects, so there is nothing to wait on."""
    while (left := [pid for pid in sorted(pids) if _runs(pid)]) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return left

"""Fixtures for the whole suite: a real etcd, and the check that no test leaves anything running.

``@pytest.mark.needs("etcd")`` skips a test on a machine without the program, ``needs("netns")`` on one that cannot make
network namespaces, ``needs(package="ray")`` without the package (``tests.support.needs``). Every test is checked for
child processes and threads that it started and did not end; the end of the session also checks for orphans, which a
mark in their environment identifies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realsys.errors import NameStoreError, WaitTimeout
from tests.support.needs import need_package, need_program
from tests.support.polling import poll, suspend
from tests.support.processes.ports import lasting_ports

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the Makefile: processes share the cores
SETTLE_S = 30.0  # a process or thread that ends within this time is no leftover
SESSION_MARK = "REALSYS_TEST_SESSION"
shared_servers: set[int] = set()  # pids that belong to session fixtures, which may start in the middle of a test
# These stay for the life of a test process, by design.
STANDING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# ---- property tests


def pytest_configure() -> None:
    """Draw the same examples in every run, and bound no time: a loaded machine must not fail a property.

    Hypothesis itself fails an example that takes 200 ms. Some machines run the GPU tests only, without Hypothesis.
    """
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "realsys", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("realsys")


# ---- needs(...)

#: programs that .ci/run has hidden; then only the tests that need one of them run, and each must be skipped by name
HIDDEN = set(os.environ.get("REALSYS_HIDDEN", "").split())


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            need_program(program)
            if program in HIDDEN:
                pytest.fail(f"{program} is hidden, and the test would run", pytrace=False)
        if "package" in mark.kwargs:
            need_package(mark.kwargs["package"])


# ---- several processes


#: system tests that read one job, by file -> job; one process runs them, any other test goes to the next free one
SHARED_JOBS = {
    "test_arith_job.py": "whole",
    "test_replay_job.py": "whole",
    "test_commands_job.py": "interrupted",
    "test_critic_job.py": "critic",
    "test_examples_job.py": "installed",
    "test_engine_job.py": "engine",
    "test_eval_job.py": "eval",
}


def shared_job(nodeid: str) -> str:
    """Return the job that this test shares with others, or the test itself."""
    return SHARED_JOBS.get(nodeid.partition("::")[0].rpartition("/")[2], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Give tests of one job to one process with ``--dist loadscope``: ``make test`` does so for jobs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByJob(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared_job(nodeid)

    return ByJob(config, log) if config.getvalue("dist") == "loadscope" else None


# ---- targets: `make test` is for every change, so no test of it starts a process of Python, outside its one job

#: folder -> the mark of its tests; the deepest folder counts
FOLDER_MARKS = {
    "contracts/cluster": "processes",
    "contracts/cluster/stream": "",
    "contracts/reward": "processes",
    "contracts/launch": "ranks",
    "contracts/train": "ranks",
    "contracts/config": "ranks",
    "unit/lab/planner": "ranks",
    "unit/lab/simulation": "ranks",
}


def mark_of_folder(path: Path) -> str:
    """Return the mark that the folder of a test file gives to its tests, "" for none."""
    parts = path.relative_to(Path(__file__).parent).parts
    folders = ("/".join(parts[:depth]) for depth in (3, 2))
    return next((FOLDER_MARKS[folder] for folder in folders if folder in FOLDER_MARKS), "")


starts: list[str] = []  # processes of Python that this one has started


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that have no test of the target: to import all of them takes a quarter of a minute.

    A mark of a target is written in the file itself, or is that of its folder.
    """
    if not collection_path.name.startswith("test_"):
        return None
    wanted = config.option.markexpr
    own = mark_of_folder(collection_path)
    if wanted in ("processes", "ranks", "alone"):
        return (own != wanted and f"mark.{wanted}" not in collection_path.read_text()) or None
    return (bool(own) and f"not {own}" in wanted) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := mark_of_folder(item.path):
            item.add_marker(mark)
    if HIDDEN:
        items[:] = [item for item in items if any(HIDDEN & {*mark.args} for mark in item.iter_markers("needs"))]


def _record_starts() -> None:
    """Note each fork of this process, and each Python that it executes."""
    fork, init = os.fork, subprocess.Popen.__init__

    def noting_fork() -> int:
        starts.append("a fork")
        return fork()

    def noting_init(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        if os.path.basename(os.fsdecode(words[0])).startswith("python"):
            starts.append(" ".join(map(str, words))[:200])
        init(self, args, *rest, **options)

    os.fork, subprocess.Popen.__init__ = noting_fork, noting_init  # type: ignore[method-assign]


_record_starts()


@pytest.fixture(autouse=True)
def belongs_to_its_target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of `make test` that starts a process. With optional packages it may be that of a package."""
    before = len(starts)
    yield
    marks = {mark.name for mark in request.node.iter_markers()}
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    is_checked = folder in ("unit", "contracts") and os.environ.get("REALSYS_PACKAGES") != "1"
    if is_checked and len(starts) > before and not marks & {"processes", "ranks"}:
        pytest.fail(f"mark it `processes` or `ranks`, because it starts {starts[before]}", pytrace=False)


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
        from realsys.cluster.names.etcd_store import EtcdNameStore  # grpc: not into sessions that fork and need no etcd

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

    def suspend(self) -> None:
        assert self._process is not None, "etcd does not run"
        suspend(self._process)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests: use unique keys, and do not stop it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    shared_servers.add(server.start())
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
    ours = _children() - children - shared_servers
    left += [f"process {pid} ({_command(pid)})" for pid in _lasting(ours, deadline - time.monotonic())]
    if left:
        pytest.fail("left running: " + ", ".join(left), pytrace=False)


def _is_worker(session: pytest.Session) -> bool:
    """One of several processes of pytest-xdist, among which a session divides its tests."""
    return hasattr(session.config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does this to a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else nothing that a test starts could be interrupted
    if _is_worker(session):
        # A suffix per worker: two jobs of the same trial name, side by side, are not mistaken for each other.
        os.environ[SESSION_MARK] += f".{session.config.workerinput['workerid']}"
    else:
        os.environ[SESSION_MARK] = uuid.uuid4().hex


def pytest_collection() -> None:
    """Look for no garbage while modules are imported: there is hardly any, and the heap is large."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave modules and test items to no later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last to do: xdist has ended its workers by now."""
    if _is_worker(session):
        return
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}".encode()
    left = _lasting({pid for pid in _all_processes() - shared_servers if _is_marked(pid, mark)}, SETTLE_S)
    if left:
        print("\nleft running by this session: " + ", ".join(f"{pid} ({_command(pid)})" for pid in left))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _children() -> set[int]:
    """Direct children, without those that have ended."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    return {pid for pid in found if _runs(pid)}


def _all_processes() -> set[int]:
    """All but this one. Its own /proc/self/environ does not show the mark, which was set after it started."""
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()}


def _is_marked(pid: int, mark: bytes) -> bool:
    """Return True for a process of this session: its environment has the mark, or the mark with a worker's suffix."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(entry == mark or entry.startswith(mark + b".") for entry in entries)
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


def _lasting(pids: set[int], timeout_s: float) -> list[int]:
    """Those that still run after this time. They are not our Popen objects, so there is nothing to wait on."""
    with contextlib.suppress(WaitTimeout):
        poll(lambda: not any(map(_runs, pids)), "the end of the processes", timeout_s)
    return [pid for pid in sorted(pids) if _runs(pid)]

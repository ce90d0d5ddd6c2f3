"""The `realsys` command in tests, forked from one server of the test process: a job pays for no imports.

The server has the modules of every kind of process. A launcher that it forks forks its own servers, as for a user, and
these have nothing left to import. A command in another folder, or on a machine without a server, is executed.
"""

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from realsys.cluster.children.fork_server import Forked, ForkServer
from realsys.launch.nodes.preload import COMPUTE, CONTROL
from tests.conftest import shared_servers, starts

COMMAND = (sys.executable, "-P", "-m", "realsys.launch.cli")
ROOT = Path(__file__).resolve().parents[3]
_MODULES = (
    "realsys.launch.cli",
    "realsys.launch.run",
    "realsys.launch.nodes.node_agent",
    "realsys.launch.commands.resume",
    "realsys.launch.commands.replay",
    "realsys.launch.commands.evaluate",
    "realsys.observe.curves",
    "tests.support.processes.late_imports",
    *CONTROL,
    *COMPUTE,
)
_one_at_a_time = threading.Lock()  # the chaos suite starts runs from several threads
_START_S = 300.0  # bound on the imports
_SERVER = (
    "import socket; from realsys.cluster.children.fork_server import serve; serve(socket.socket(fileno={}), {}, {})"
)


class ForkedCommand(Forked):
    """A command of realsys, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
            super().wait()
            os.close(self._pidfd)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Command = ForkedCommand | subprocess.Popen[str]


def _with_tests(env: Mapping[str, str]) -> str:
    """PYTHONPATH with this repository, for doors in tests."""
    return os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])


@functools.cache
def server() -> ForkServer:
    """The server of this test process, ready. It is executed: a test process has several threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = _SERVER.format(theirs.fileno(), _MODULES, os.getpid())
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _with_tests(os.environ)}
        argv = [sys.executable, "-P", "-c", program]
        process = subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    process.returncode = 0  # the server object collects it
    shared_servers.add(process.pid)
    made = ForkServer(_MODULES, process.pid, ours)
    deadline = time.monotonic() + _START_S
    assert made.ready(deadline - time.monotonic()), "the fork server of the tests does not start"
    return made


def start(
    argv: Sequence[str], stdout: IO[Any], stderr: IO[Any], env: Mapping[str, str], cwd: Path | None = None
) -> Command:
    """Start a command, in a session of its own, as in a terminal: the terminal's Ctrl-C must not reach us."""
    if tuple(argv[:4]) == COMMAND and cwd is None:
        starts.append(" ".join(argv[4:]))
        path = {"PYTHONPATH": _with_tests(env)}
        with _one_at_a_time:
            forked = server().start(argv, {**env, **path}, stdout.fileno(), stderr.fileno())
        return ForkedCommand(forked.pid)
    return subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )

"""Forks Python programs from a process that has imported their modules: milliseconds instead of seconds.

    this process ──fork──> server: imports the modules, "ready"
                   argv, environment, descriptors ──> fork ──> the program, which leads a new session
                                                <── its pid

A started program is a child of this process, as if this process had executed it: the server forks twice and its first
child ends, so the kernel gives the program to the nearest subreaper above it. During ``start`` that is this process.
The program waits until then, so ``os.getppid`` returns this process.

Rules:

* A server is forked before this process has a second thread, an event loop or a CUDA context. Its modules must not
  start a thread either; a server with two threads does not become ready.
* A server that is not ready, or has ended, is no error: the caller executes the program instead. Only a server that
  fails during a fork is one, because the program may have started.
* No process outlives this one because of a server, and a server never outlives this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from realsys.cluster import prctl
from realsys.cluster.process import end, flush

log = logging.getLogger(__name__)

_READY = b"ready"
_MAX_MESSAGE = 4096  # bytes
_MAX_DESCRIPTORS = 8
_REPLY_S = 20.0  # bound on a fork, which takes milliseconds, on a machine that swaps
_EXIT_S = 30.0  # bound on the exit handlers of a program


class Forked:
    """A child of this process that a server has forked. It has the part of ``subprocess.Popen`` that is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = None

    def wait(self) -> int:
        """Wait for the end, and return the exit code, or minus the signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkServer:
    """A child process that forks programs which run one of ``modules``. Not for several threads at a time."""

    def __init__(self, modules: Sequence[str], pid: int, channel: socket.socket) -> None:
        """``pid``: a child that runs ``serve`` with the other end of ``channel``."""
        self.modules = frozenset(modules)
        self._pid = pid
        self._channel = channel
        self._is_ready = False

    @classmethod
    def fork(cls, modules: Sequence[str]) -> ForkServer:
        """Fork this process, which must have one thread. The server imports ``modules``, in this order."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        flush()
        if not (pid := os.fork()):
            serve(theirs, modules, parent)
        theirs.close()
        return cls(modules, pid, ours)

    def ready(self, timeout_s: float = 0.0) -> bool:
        """Return True once the server can fork; wait for that for at most ``timeout_s``. False if it has ended."""
        if self._is_ready and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self._fail("it has ended")
        elif self._pid and not self._is_ready:
            if select.select([self._channel], [], [], timeout_s)[0]:
                reply = self._channel.recv(_MAX_MESSAGE)
                self._is_ready = reply == _READY
                if not self._is_ready:
                    self._fail(reply.decode() or "it has ended")
            elif timeout_s:
                log.warning("the imports took more than %g s, so programs are executed until they are done", timeout_s)
        return self._is_ready

    @property
    def is_starting(self) -> bool:
        """True while the server makes its imports."""
        return not self.ready() and self._pid > 0

    def runs(self, argv: Sequence[str]) -> bool:
        """Return True if ``argv`` is a program of this server, and it is ready."""
        return module_of(argv) in self.modules and self.ready()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], output: int, errors: int, inherit: Sequence[int] = ()
    ) -> Forked:
        """Fork a program. ``output`` and ``errors`` become its stdout and stderr; ``inherit`` stay open in it,
        under other numbers. Raises OSError if the server has failed.
        """
        try:
            with prctl.subreaper(), os.fdopen(os.memfd_create("order"), "w+") as order:
                json.dump({"argv": list(argv), "env": dict(env)}, order)  # an environment may exceed any message
                order.flush()
                socket.send_fds(self._channel, [b"start"], [order.fileno(), output, errors, *inherit])
                self._channel.settimeout(_REPLY_S)
                reply = self._channel.recv(_MAX_MESSAGE)
            return Forked(int(reply))
        except (OSError, ValueError) as exc:
            self._fail(str(exc))
            raise OSError(f"the fork server has failed: {exc}") from exc

    def close(self) -> None:
        """End the server. Its programs stay."""
        self._is_ready = False
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._channel.close()
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _fail(self, why: str) -> None:
        log.warning("a fork server does not work, so programs are executed: %s", why)
        self.close()


def module_of(argv: Sequence[str]) -> str:
    """Return the module that ``argv`` runs with this interpreter: ``python -P -m MODULE ...``; "" for other words."""
    return argv[3] if list(argv[:3]) == [sys.executable, "-P", "-m"] else ""


# ---- the server


def serve(channel: socket.socket, modules: Sequence[str], parent: int) -> NoReturn:
    """Be the server of process ``parent``: import, then fork until the parent closes the channel or ends."""
    try:
        os.setsid()  # the terminal's Ctrl-C is for the parent
        if not prctl.die_with_parent(signal.SIGKILL, parent):
            os._exit(0)
        _close_all_but([channel.fileno()])
        prctl.show_as(["realsys-fork-server", *modules[-1:]], os.environ)
        problem = _import(modules)
        channel.send(problem.encode()[:_MAX_MESSAGE] or _READY)
        while not problem and (message := socket.recv_fds(channel, _MAX_MESSAGE, _MAX_DESCRIPTORS))[0]:
            channel.send(str(_fork_program(message[1])).encode())
    except ConnectionError:  # the parent has just ended
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _import(modules: Sequence[str]) -> str:
    """Import the modules. Returns why this process must not fork then; "" if it may."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as exc:  # the program itself will report it better
        return f"{type(exc).__name__}: {exc}"
    gc.collect()
    gc.freeze()  # else a collection in a program would copy the pages that all of them share
    threads = len(os.listdir("/proc/self/task"))
    return f"its modules have started {threads - 1} threads" if threads > 1 else ""


def _fork_program(descriptors: Sequence[int]) -> int:
    """Fork a program away from this process. Returns its pid. ``descriptors``: its order, stdout, stderr, others."""
    pids, gate = os.pipe(), os.pipe()
    first = os.fork()
    if not first:
        program = os.fork()
        if not program:
            os.close(gate[1])
            os.read(gate[0], 1)  # end of file: the first child has ended, and this one has its new parent
            with open(descriptors[0], "rb") as order:
                order.seek(0)
                _run_program(json.load(order), descriptors[1:])
        os.write(pids[1], str(program).encode())
        os._exit(0)
    os.waitpid(first, 0)
    program = int(os.read(pids[0], 32))
    for descriptor in (*pids, *gate, *descriptors):
        os.close(descriptor)
    return program


def _run_program(order: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the program: lead a new session, take its output, environment and paths, show its words in /proc, run it."""
    argv = order["argv"]
    code: object = 1
    try:
        os.setsid()
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        for number in (1, 2):
            os.dup2(descriptors[number - 1], number)
        _close_all_but(descriptors[2:])
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        # ``sys.path`` of ``python -P`` with this PYTHONPATH
        ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        installed = sys.path if sys.flags.safe_path else sys.path[1:]
        theirs = [os.path.abspath(path) for path in order["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = list(dict.fromkeys([*theirs, *(path for path in installed if path not in ours)]))
        os.environ.clear()
        os.environ.update(order["env"])
        prctl.show_as(argv, order["env"])
        module = importlib.import_module(module_of(argv))
        sys.modules["__main__"] = module
        sys.argv = [str(module.__file__), *argv[4:]]
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # the interpreter does this for its own random numbers
        importlib.invalidate_caches()
        code = module.main()
    except SystemExit as exc:
        code = exc.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    end(code if isinstance(code, int) else int(code is not None), _EXIT_S)


def _close_all_but(kept: Sequence[int]) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the listing's descriptor is closed already
                os.close(number)

"""ZygoteProcess: the zygote as the outside sees it. Starts it, and has it start, watch and kill programs.

``send`` and the like raise SandboxError if the zygote fails; the next program gets another one. For one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from realsys.errors import SandboxError
from realsys.reward.sandbox.inside import plain
from realsys.reward.sandbox.inside.child import READY
from realsys.reward.sandbox.inside.zygote import KILLED, MAX_MESSAGE
from realsys.reward.sandbox.settings import (
    ALLOW,
    NONE,
    NOT_ALLOWED,
    IsolationSettings,
    RunEnded,
    RunLimits,
    environment,
    setup_of,
    zygote_command,
)

START_S = 20.0  # bound on the start of the zygote
_BEGIN_S = 20.0  # bound on the start of a program, on a busy machine
_LAST_S = 1.0  # a program that closes its channel ends within this time, or is killed
_END_S = 20.0  # bound on the end of a killed program
MAX_CALLS = 1000  # calls that may take all their CPU time; the system's own limit of a process counts all of them


class SandboxChild:
    """A child of the zygote, from the outside."""

    def __init__(self, zygote: ZygoteProcess, number: int, channel: socket.socket, limits: RunLimits) -> None:
        self.number = number
        self.channel = channel
        self.limits = limits
        self.born = self.begin = time.monotonic()
        self.ended: RunEnded | None = None
        self.waited_s: float | None = None  # answer of the zygote to ``own_s``
        self.reached = ""
        self.zygote = zygote

    def kill(self, reached: str) -> None:
        self.reached = self.reached or reached
        self.zygote.send({"kill": self.number})

    @property
    def left_s(self) -> float:
        """Return the time until the sandbox gives up. The zygote watches over the limits of the program."""
        return max(0.0, self.begin + self.limits.clock_s - time.monotonic())

    def own_s(self, begin: float) -> float:
        """Return the time since ``begin``, without the time in which the machine had no processor for it."""
        self.waited_s = None
        self.zygote.send({"ask": self.number})
        until = time.monotonic() + _END_S
        while self.waited_s is None and self.ended is None and (left := until - time.monotonic()) > 0:
            self.zygote.look(left)
        return time.monotonic() - begin - (self.waited_s or 0.0)

    def mark(self) -> None:
        """Begin another run."""
        self.begin = time.monotonic()
        self.zygote.send({"mark": self.number})


class ZygoteProcess:
    """One zygote at a time, started when it is needed. ``restarts``: zygotes that failed."""

    def __init__(self, settings: IsolationSettings) -> None:
        self.restarts = 0
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        #: Ended zygotes are not collected: their CPU time would count as that of this process.
        self._dead: list[subprocess.Popen[bytes]] = []
        self._number = 0
        self._children: dict[int, SandboxChild] = {}

    @property
    def pid(self) -> int | None:
        """Return the number of its outermost process; None if there is no zygote."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when the zygote has something to say (``look``)."""
        if self._control is None:
            raise SandboxError("sandbox: there is no zygote")
        return self._control.fileno()

    def close(self) -> None:
        """End the zygote and all programs."""
        self._drop()
        for process in self._dead:
            process.kill()
            process.wait()
        self._dead.clear()

    # ---- children

    @contextlib.contextmanager
    def child(self, mode: str, limits: RunLimits, descriptors: list[int], partner: int = 0) -> Iterator[SandboxChild]:
        """Start a child; on leaving it is killed, with all that it started. ``partner``: child that it calls."""
        control = self._started()
        self._number += 1
        ours, theirs = socket.socketpair()
        child = SandboxChild(self, self._number, ours, limits)
        with ours:
            own = limits.as_message(MAX_CALLS if mode == "serve" else 0)
            message = {"id": child.number, "mode": mode, "limits": own, "partner": partner}
            try:
                socket.send_fds(control, [json.dumps(message).encode()], [theirs.fileno(), *descriptors])
            except OSError as error:
                theirs.close()
                raise self.failed(f"cannot be asked: {error}") from None
            theirs.close()
            self._children[child.number] = child
            try:
                yield child
            finally:
                if self._control is control and child.ended is None:
                    self.finish(child)
                self._children.pop(child.number, None)

    def give(self, child: SandboxChild, task: dict[str, Any]) -> None:
        """Wait until the child is confined, and give it its task. Raises SandboxError."""
        descriptor = child.channel.fileno()
        ready, _, _ = select.select([descriptor], [], [], _BEGIN_S)
        said = plain.receive(descriptor) if ready else b""
        if said != READY:
            self.look(0.2)
            problem = "ended" if said is None else said.decode("utf-8", "replace") or f"no start within {_BEGIN_S:g} s"
            raise self.failed(f"a program could not be confined: {problem}")
        child.born = child.begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            plain.send(descriptor, plain.encode(task))

    def finish(self, child: SandboxChild, seconds: float = 0.0) -> RunEnded:
        """Kill the child if it has not ended within ``seconds``, and return how it ended."""
        self.wait(child, seconds)
        if child.ended is None:
            self.send({"kill": child.number})
            self.wait(child, _END_S)
        if child.ended is None:
            raise self.failed("a killed program did not end")
        return child.ended

    def wait(self, child: SandboxChild, seconds: float) -> None:
        """Wait until the child has ended, at most ``seconds``."""
        until = time.monotonic() + seconds
        while child.ended is None and (left := until - time.monotonic()) > 0:
            self.look(left)

    def last(self, child: SandboxChild) -> RunEnded:
        """Return how a child ended that has closed its channel."""
        return self.finish(child, _LAST_S)

    def starved(self, child: SandboxChild) -> SandboxError:
        """Give up a program that the machine did not run."""
        return self.failed(f"no end of a program within {child.limits.clock_s:g} s: the machine is too busy")

    # ---- the zygote

    def _started(self) -> socket.socket:
        """Return the channel of a zygote that is up. Raises SandboxError."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            setup = json.dumps(setup_of(self._settings))
            command = zygote_command(self._settings, theirs.fileno(), setup)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=environment(),
                start_new_session=True,  # the kernel shares processors fairly among sessions
            )
        self._control = ours
        ready, _, _ = select.select([ours], [], [], START_S)
        said = ours.recv(MAX_MESSAGE) if ready else b""
        if not said:
            words = self._last_words()
            is_denied = self._settings.isolation != NONE and NOT_ALLOWED.search(words)
            raise self.failed(f"did not start: {words}" + (f": {ALLOW}" if is_denied else ""))
        return ours

    def _last_words(self) -> str:
        assert self._process is not None and self._process.stderr is not None
        self._process.kill()
        text = self._process.stderr.read(4000).decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(text) if line.strip()), "it said nothing")

    def send(self, message: dict[str, Any]) -> None:
        """Tell the zygote. Raises SandboxError."""
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        try:
            self._control.sendall(json.dumps(message).encode())
        except OSError as error:
            raise self.failed(f"cannot be told: {error}") from None

    def look(self, seconds: float) -> None:
        """Read what the zygote says: one message, if it comes within ``seconds``. Raises SandboxError."""
        assert self._control is not None
        ready, _, _ = select.select([self._control], [], [], max(0.0, seconds))
        if not ready:
            return
        try:
            data = self._control.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            raise self.failed("died")
        message = json.loads(data)
        child = self._children.get(message["id"])
        if "error" in message:
            raise self.failed(f"a program could not be started: {message['error']}")
        if child is not None and "code" not in message:
            child.waited_s = message["waited_s"]
        elif child is not None and message["reached"] == KILLED:
            raise self.failed("a program was killed from outside: the machine has no memory left")
        elif child is not None:
            wall_s = time.monotonic() - child.born
            reached = child.reached or message["reached"]
            use = message["cpu_s"], wall_s, message["waited_s"], message["peak_mb"]
            child.ended = RunEnded(message["code"], reached, *use)

    def failed(self, problem: str) -> SandboxError:
        """End the zygote; the next program gets a new one."""
        self.restarts += 1
        self._drop()
        return SandboxError(f"sandbox: {problem}")

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._dead.append(self._process)
            self._process = None
        self._children.clear()

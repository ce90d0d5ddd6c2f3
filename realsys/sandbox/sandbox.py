"""Sandbox: runs programs that nobody has read. For one thread.

    with Sandbox() as sandbox:
        output = sandbox.run("print(input())", b"hi", Limits())            # input and output
        with sandbox.serve("def f(x): return x + 1", Limits()) as program:  # calls
            program.call("f", 1)
        sandbox.test("def f(x): return x + 1", UnitTests("assert f(1) == 2"), Limits())

`error-is-not-data`: a failure of the sandbox itself raises SandboxError. It is never the result of a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from realsys.errors import SandboxError
from realsys.sandbox import isolation
from realsys.sandbox.inside import plain
from realsys.sandbox.inside.child import READY
from realsys.sandbox.inside.zygote import MAX_MESSAGE
from realsys.sandbox.limits import CRASHED, MEMORY, OUTPUT, WRONG, Ended, Limits, Output, UnitTestsResult

START_S = 20.0  # bound on the start of the zygote
_BEGIN_S = 20.0  # bound on the start of a program, on a busy machine
_LAST_S = 1.0  # a program that closes its channel ends within this time, or is killed
_END_S = 20.0  # bound on the end of a killed program
_CHUNK = 1 << 16
_STDERR = 4096  # bytes of stderr that are kept
MAX_CALLS = 1000  # calls that may take all their CPU time; the system's own limit of a process counts all of them
_LONG_S = 0.2  # a run that has taken less goes on with the next call


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run instead of Python.

    argv   absolute path of the executable, and arguments; the working folder is /tmp
    files  files to write before, path -> content; they are executable
    makes  file whose content is wanted afterwards (Output.made), such as a compiled program
    """

    argv: tuple[str, ...]
    files: dict[str, bytes]
    makes: str = ""


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Source of tests; names that it does not define are the program's.

    trusted   sources that define helpers of the tests, such as the prompt; ``function`` is always the program's
    """

    source: str
    function: str = ""
    trusted: tuple[str, ...] = ()


class ProgramRaised(Exception):
    """The program raised an exception, or has ended (``gone``). ``reason``: one of ``limits.REASONS``."""

    def __init__(self, reason: str, message: str, *, gone: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.gone = gone


class _Child:
    """A child of the zygote, from the outside."""

    def __init__(self, sandbox: Sandbox, number: int, channel: socket.socket, limits: Limits) -> None:
        self.number = number
        self.channel = channel
        self.limits = limits
        self.born = self.begin = time.monotonic()
        self.ended: Ended | None = None
        self.reached = ""
        self._sandbox = sandbox

    def kill(self, reached: str) -> None:
        self.reached = self.reached or reached
        self._sandbox.send({"kill": self.number})

    @property
    def left_s(self) -> float:
        """Return the time until the sandbox gives up. The zygote watches over the limits of the program."""
        return max(0.0, self.begin + self.limits.clock_s - time.monotonic())

    def mark(self) -> None:
        """Begin another run."""
        self.begin = time.monotonic()
        self._sandbox.send({"mark": self.number})


class Sandbox:
    """Programs in a sandbox with one zygote, which is started when it is needed. ``restarts``: zygotes that died."""

    def __init__(self, settings: isolation.Settings | None = None) -> None:
        self.restarts = 0
        self._settings = settings or isolation.Settings()
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        #: Ended zygotes are not collected: their CPU time would count as that of this process.
        self._dead: list[subprocess.Popen[bytes]] = []
        self._number = 0
        self._children: dict[int, _Child] = {}

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a caller wants

    def run(self, program: str | Command, stdin: bytes, limits: Limits) -> Output:
        """Run a program, source or command, with input and output. Raises SandboxError.

        Output.stderr is the end of it.
        """
        is_command = isinstance(program, Command)
        with contextlib.ExitStack() as stack:
            given = stack.enter_context(os.fdopen(os.memfd_create("stdin"), "w+b", buffering=0))
            given.write(stdin)
            given.seek(0)
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
            readers = [stack.enter_context(os.fdopen(pipe[0], "rb", buffering=0)) for pipe in pipes]
            writers = [stack.enter_context(os.fdopen(pipe[1], "wb", buffering=0)) for pipe in pipes]
            descriptors = [given.fileno(), *(writer.fileno() for writer in writers)]
            child = stack.enter_context(self._child("command" if is_command else "run", limits, descriptors))
            for writer in writers:
                writer.close()
            self._give(child, _command_task(program) if isinstance(program, Command) else {"source": program})
            return self._pump(child, [reader.fileno() for reader in readers], is_command)

    @contextlib.contextmanager
    def serve(self, source: str, limits: Limits) -> Iterator[Program]:
        """Load a program in a process that answers calls. Raises SandboxError."""
        ours, theirs = socket.socketpair()
        with ours, contextlib.ExitStack() as stack:
            child = stack.enter_context(self._child("serve", limits, [theirs.fileno()]))
            theirs.close()
            self._give(child, {"source": source})
            yield Program(self, child, ours)

    def test(self, source: str, tests: UnitTests, limits: Limits) -> UnitTestsResult:
        """Run unit tests in one process against the program in another. Raises SandboxError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            program = stack.enter_context(self._child("serve", limits, [theirs.fileno()]))
            tester = stack.enter_context(self._child("test", limits, [ours.fileno()]))
            ours.close()
            theirs.close()
            self._give(program, {"source": source})
            task = {"source": tests.source, "function": tests.function, "trusted": list(tests.trusted)}
            self._give(tester, task)
            verdict = self._verdict(tester)
            if verdict is None:
                reason = self._how(tester) or CRASHED
                return UnitTestsResult(False, reason, "the process of the tests ended")
            if verdict["passed"]:
                return UnitTestsResult(True)
            reason = self._how(program) if verdict["gone"] else WRONG
            return UnitTestsResult(False, reason or CRASHED, verdict["why"])

    def close(self) -> None:
        """End the zygote and all programs."""
        self._drop()
        for process in self._dead:
            process.kill()
            process.wait()
        self._dead.clear()

    # ---- children

    @contextlib.contextmanager
    def _child(self, mode: str, limits: Limits, descriptors: list[int]) -> Iterator[_Child]:
        """Start a child; on leaving it is killed, with all that it started."""
        control = self._started()
        self._number += 1
        ours, theirs = socket.socketpair()
        child = _Child(self, self._number, ours, limits)
        with ours:
            runs = MAX_CALLS if mode == "serve" else 1
            message = {"id": child.number, "mode": mode, "limits": limits.as_message(runs)}
            try:
                socket.send_fds(control, [json.dumps(message).encode()], [theirs.fileno(), *descriptors])
            except OSError as error:
                theirs.close()
                raise self._failed(f"cannot be asked: {error}") from None
            theirs.close()
            self._children[child.number] = child
            try:
                yield child
            finally:
                if self._control is control and child.ended is None:
                    self.finish(child)
                self._children.pop(child.number, None)

    def _give(self, child: _Child, task: dict[str, Any]) -> None:
        """Wait until the child is confined, and give it its task. Raises SandboxError."""
        descriptor = child.channel.fileno()
        ready, _, _ = select.select([descriptor], [], [], _BEGIN_S)
        said = plain.receive(descriptor) if ready else b""
        if said != READY:
            self._look(0.2)
            problem = "ended" if said is None else said.decode("utf-8", "replace") or f"no start within {_BEGIN_S:g} s"
            raise self._failed(f"a program could not be confined: {problem}")
        child.born = child.begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            plain.send(descriptor, plain.encode(task))

    def finish(self, child: _Child, seconds: float = 0.0) -> Ended:
        """Kill the child if it has not ended after so long, and return how it ended."""
        self.wait(child, seconds)
        if child.ended is None:
            self.send({"kill": child.number})
            self.wait(child, _END_S)
        if child.ended is None:
            raise self._failed("a killed program did not end")
        return child.ended

    def wait(self, child: _Child, seconds: float) -> None:
        """Wait until the child has ended, at most so long."""
        until = time.monotonic() + seconds
        while child.ended is None and (left := until - time.monotonic()) > 0:
            self._look(left)

    def _how(self, child: _Child) -> str:
        """Return why a child that ends has ended."""
        return self.finish(child, _LAST_S).reason

    def _verdict(self, tester: _Child) -> dict[str, Any] | None:
        """Return what the tests say; None if they reach a limit or crash."""
        if not select.select([tester.channel], [], [], tester.left_s)[0]:
            raise self.starved(tester)
        data = plain.receive(tester.channel.fileno())
        return None if data is None else plain.decode(data)

    def starved(self, child: _Child) -> SandboxError:
        """Give up a program that the machine did not run."""
        return self._failed(f"no end of a program within {child.limits.clock_s:g} s: the machine is too busy")

    def _pump(self, child: _Child, readers: list[int], is_command: bool) -> Output:
        """Read what the child writes until it has ended."""
        stdout, stderr = bytearray(), bytearray()
        open_readers, left = list(readers), int(child.limits.output_mb * (1 << 20))
        answer: dict[str, Any] = {}
        if is_command:
            open_readers.append(child.channel.fileno())
        while child.ended is None or open_readers:
            assert self._control is not None
            watched = [*open_readers, self._control.fileno()] if child.ended is None else open_readers
            ready, _, _ = select.select(watched, [], [], child.left_s)
            if not ready:
                raise self.starved(child)
            for descriptor in ready:
                if descriptor == self._control.fileno():
                    self._look(0.0)
                elif descriptor not in readers:
                    open_readers.remove(descriptor)
                    answer = self._answer(descriptor)
                elif data := os.read(descriptor, _CHUNK):
                    left -= len(data)
                    if left < 0 and not child.reached:
                        child.kill(OUTPUT)
                    elif left >= 0 and descriptor == readers[0]:
                        stdout += data
                    elif left >= 0:
                        stderr[:] = (stderr + data)[-_STDERR:]
                else:
                    open_readers.remove(descriptor)
        ended = child.ended
        if answer:
            ended = dataclasses.replace(ended, code=ended.code or answer["code"])
        return Output(ended, bytes(stdout), bytes(stderr), answer.get("made"))

    def _answer(self, descriptor: int) -> dict[str, Any]:
        """Return what a command's process says; it is as little trusted as the program."""
        try:
            data = plain.receive(descriptor)
            answer = {} if data is None else plain.decode(data)
        except (OSError, plain.PlainError):
            return {}
        fits = isinstance(answer, dict) and type(answer.get("code")) is int
        return answer if fits and isinstance(answer.get("made"), bytes | None) else {}

    # ---- the zygote

    def _started(self) -> socket.socket:
        """Return the channel of a zygote that is up. Raises SandboxError."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            setup = json.dumps(isolation.setup_of(self._settings))
            command = isolation.zygote_command(self._settings, theirs.fileno(), setup)
            self._zygote = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=isolation.environment(),
                start_new_session=True,  # the kernel shares processors fairly among sessions
            )
        self._control = ours
        ready, _, _ = select.select([ours], [], [], START_S)
        said = ours.recv(MAX_MESSAGE) if ready else b""
        if not said:
            raise self._failed(f"did not start: {self._last_words()}")
        return ours

    def _last_words(self) -> str:
        assert self._zygote is not None and self._zygote.stderr is not None
        self._zygote.kill()
        text = self._zygote.stderr.read(4000).decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(text) if line.strip()), "it said nothing")

    def send(self, message: dict[str, Any]) -> None:
        """Tell the zygote. Raises SandboxError."""
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        try:
            self._control.sendall(json.dumps(message).encode())
        except OSError as error:
            raise self._failed(f"cannot be told: {error}") from None

    def _look(self, seconds: float) -> None:
        """Read what the zygote says: one message, if there is one within this time. Raises SandboxError."""
        assert self._control is not None
        ready, _, _ = select.select([self._control], [], [], max(0.0, seconds))
        if not ready:
            return
        try:
            data = self._control.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            raise self._failed("died")
        message = json.loads(data)
        child = self._children.get(message["id"])
        if "error" in message:
            raise self._failed(f"a program could not be started: {message['error']}")
        if child is not None:
            wall_s = time.monotonic() - child.born
            reached = child.reached or message["reached"]
            use = message["cpu_s"], wall_s, message["waited_s"], message["peak_mb"]
            child.ended = Ended(message["code"], reached, *use)

    def _failed(self, problem: str) -> SandboxError:
        """End the zygote; the next program gets a new one."""
        self.restarts += 1
        self._drop()
        return SandboxError(f"sandbox: {problem}")

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None:
            self._zygote.kill()
            if self._zygote.stderr is not None:
                self._zygote.stderr.close()
            self._dead.append(self._zygote)
            self._zygote = None
        self._children.clear()


class Program:
    """A program that answers calls."""

    def __init__(self, sandbox: Sandbox, child: _Child, link: socket.socket) -> None:
        self._sandbox = sandbox
        self._child = child
        self._link = link
        self._loaded = False

    @property
    def time_s(self) -> float:
        """Return its time since its start; once it has ended, without the time in which it had no processor."""
        ended = self._child.ended
        return time.monotonic() - self._child.born if ended is None else ended.own_s

    def call(self, name: str, arguments: list[Any], most: int = plain.MAX_FRAME) -> Any:
        """Return the plain data that a function returns, of at most so many bytes. Raises ProgramRaised."""
        if not self._loaded:
            self._receive(most)
            self._loaded = True
        if time.monotonic() - self._child.begin > _LONG_S:
            self._child.mark()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            plain.send(self._link.fileno(), plain.encode(("call", name, arguments, {})))
        return self._receive(most)

    def _receive(self, most: int) -> Any:
        descriptor = self._link.fileno()
        data = bytearray()
        wanted = plain.LENGTH.size
        while len(data) < wanted:
            if not select.select([descriptor], [], [], self._child.left_s)[0]:
                raise self._sandbox.starved(self._child)
            try:
                chunk = os.read(descriptor, min(_CHUNK, wanted - len(data)))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise self._gone()
            data += chunk
            if len(data) == plain.LENGTH.size:
                wanted += plain.LENGTH.unpack(data)[0]
                if wanted > most + plain.LENGTH.size:
                    raise ProgramRaised(OUTPUT, "the result is too long")
        try:
            answer = plain.decode(bytes(data[plain.LENGTH.size :]))
        except plain.PlainError as error:
            raise ProgramRaised(CRASHED, str(error)) from None
        if isinstance(answer, tuple) and len(answer) == 2 and answer[0] == "ok":
            return answer[1]
        if isinstance(answer, tuple) and len(answer) == 3:
            reason = MEMORY if answer[1] and answer[1][:1] == ["MemoryError"] else CRASHED
            raise ProgramRaised(reason, f"{answer[1]}: {answer[2]}"[:300], gone=not self._loaded)
        raise ProgramRaised(CRASHED, "the result cannot be read")

    def _gone(self) -> ProgramRaised:
        """Return why the program has ended, or has closed its end of the link."""
        ended = self._sandbox.finish(self._child, _LAST_S)
        return ProgramRaised(ended.reached or CRASHED, "the program ended")


def _command_task(command: Command) -> dict[str, Any]:
    return {
        "argv": list(command.argv),
        "files": command.files,
        "makes": command.makes,
        "environment": isolation.environment(),
    }

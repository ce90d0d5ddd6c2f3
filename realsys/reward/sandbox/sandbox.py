"""Sandbox: runs programs of a model. For one thread.

    with Sandbox() as sandbox:
        output = sandbox.run("print(input())", b"hi", RunLimits())            # input and output
        with sandbox.serve("def f(x): return x + 1", RunLimits()) as program:  # calls
            program.call("f", 1)
        sandbox.test("def f(x): return x + 1", UnitTests("assert f(1) == 2"), RunLimits())

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from realsys.errors import DataError, SandboxError
from realsys.reward.sandbox.inside import plain
from realsys.reward.sandbox.inside.zygote import KILLED, MAX_MESSAGE, READY
from realsys.reward.sandbox.settings import (
    ALLOW,
    CRASHED,
    MEMORY,
    NONE,
    NOT_ALLOWED,
    OUTPUT,
    WALL,
    WRONG,
    IsolationSettings,
    Output,
    RunEnded,
    RunLimits,
    UnitTestsResult,
    environment,
    setup_of,
    zygote_command,
)

_CHUNK = 1 << 16
_STDERR = 4096  # bytes of stderr that are kept


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """A command to run instead of Python.

    argv   absolute path of the executable, and arguments; the working folder is /tmp
    files  files to write before, path -> content, 3 at most; they are executable
    makes  file whose content is wanted afterwards (Output.made), such as a compiled program
    """

    argv: tuple[str, ...]
    files: dict[str, bytes]
    makes: str = ""


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Source of tests. Names that it calls or passes on and does not define are the program's.

    trusted   sources that define helpers of the tests, such as the prompt; ``function`` is always the program's
    """

    source: str
    function: str = ""
    trusted: tuple[str, ...] = ()


class _Streams:
    """Output of a child, which is killed when it writes too much."""

    def __init__(self, child: SandboxChild, out: int, _: int) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()  # the end of it
        self._child = child
        self._out = out
        self._left = int(child.limits.output_mb * (1 << 20))

    def read(self, descriptor: int) -> bool:
        """Read the next part of a stream; False: the stream has ended."""
        data = os.read(descriptor, _CHUNK)
        self._left -= len(data)
        if self._left < 0 and not self._child.reached:
            self._child.kill(OUTPUT)
        elif self._left >= 0 and descriptor == self._out:
            self.stdout += data
        elif self._left >= 0:
            self.stderr[:] = (self.stderr + data)[-_STDERR:]
        return bool(data)


class Sandbox:
    """Programs in a sandbox with one zygote, which is started when it is needed."""

    def __init__(self, settings: IsolationSettings | None = None) -> None:
        self.zygote = ZygoteProcess(settings or IsolationSettings())

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a caller wants

    def run(self, program: str | SandboxCommand, stdin: bytes, limits: RunLimits) -> Output:
        """Run a program, source or command, with input and output. Raises SandboxError.

        Output.stderr is the end of it.
        """
        command = program if isinstance(program, SandboxCommand) else None
        contents = [stdin, b"", *command.files.values()] if command else [stdin]
        with contextlib.ExitStack() as stack:
            given, *others = [stack.enter_context(_memory_file(content)) for content in contents]
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
            readers = [stack.enter_context(os.fdopen(pipe[0], "rb", buffering=0)) for pipe in pipes]
            writers = [stack.enter_context(os.fdopen(pipe[1], "wb", buffering=0)) for pipe in pipes]
            descriptors = [file.fileno() for file in (given, *writers, *others)]
            child = stack.enter_context(self.zygote.child("command" if command else "run", limits, descriptors))
            for writer in writers:
                writer.close()
            self.zygote.give(child, _command_task(command) if command else {"source": program})
            return self._pump(child, [reader.fileno() for reader in readers], others[0] if command else None)

    @contextlib.contextmanager
    def serve(self, source: str, limits: RunLimits) -> Iterator[Program]:
        """Load a program in a process that answers calls. Raises SandboxError."""
        ours, theirs = socket.socketpair()
        with ours, contextlib.ExitStack() as stack:
            child = stack.enter_context(self.zygote.child("serve", limits, [theirs.fileno()]))
            theirs.close()
            self.zygote.give(child, {"source": source})
            yield Program(child, ours)

    def test(self, source: str, tests: UnitTests, limits: RunLimits) -> UnitTestsResult:
        """Run unit tests in one process against the program in another.

        Raises SandboxError, and DataError for tests that pass without a call of the program.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            program = stack.enter_context(self.zygote.child("serve", limits, [theirs.fileno()]))
            tester = stack.enter_context(self.zygote.child("test", limits, [ours.fileno()], program.number))
            ours.close()
            theirs.close()
            self.zygote.give(program, {"source": source})
            task = {"source": tests.source, "function": tests.function, "trusted": list(tests.trusted)}
            self.zygote.give(tester, task)
            verdict = self._verdict(tester)
            ended = self.zygote.last(tester)
            if verdict is None:
                reason = ended.reason or CRASHED
                return UnitTestsResult(False, reason, "the process of the tests ended")
            if verdict["passed"] and not verdict["called"]:
                raise DataError("the tests called nothing of the program: any program would pass")
            if verdict["passed"]:
                return UnitTestsResult(True)
            reason = self.zygote.last(program).reason if verdict["gone"] else WRONG
            return UnitTestsResult(False, reason or CRASHED, verdict["why"])

    def close(self) -> None:
        """End the zygote and all programs."""
        self.zygote.close()

    def _verdict(self, tester: SandboxChild) -> dict[str, Any] | None:
        """Return what the tests say; None if they reach a limit or crash."""
        if not select.select([tester.channel], [], [], tester.left_s)[0]:
            raise self.zygote.starved(tester)
        data = plain.receive(tester.channel.fileno())
        return None if data is None else plain.decode(data)

    def _pump(self, child: SandboxChild, readers: list[int], made: BinaryIO | None) -> Output:
        """Read what the child writes until it has ended. ``made``: file that a command fills."""
        streams = _Streams(child, *readers)
        sources = [*readers, child.channel.fileno()] if made else list(readers)
        answer: dict[str, Any] = {}
        while child.ended is None or sources:
            watched, left_s = [*sources, self.zygote.fileno()], child.left_s
            if child.ended is not None:  # without isolation, what it started may hold the pipes: never wait for it
                watched, left_s = sources, 0.0
            ready, _, _ = select.select(watched, [], [], left_s)
            if not ready and child.ended is None:
                raise self.zygote.starved(child)
            if child.ended is not None and (not ready or child.reached):
                break
            for descriptor in ready:
                if descriptor not in sources:
                    self.zygote.look(0.0)
                elif descriptor not in readers:
                    sources.remove(descriptor)
                    answer = self._answer(descriptor)
                elif not streams.read(descriptor):
                    sources.remove(descriptor)
        ended = child.ended
        if answer:
            ended = dataclasses.replace(ended, code=answer["code"] or ended.code)
        content = None
        if made and answer.get("made"):
            made.seek(0)
            content = made.read()
        return Output(ended, bytes(streams.stdout), bytes(streams.stderr), content)

    def _answer(self, descriptor: int) -> dict[str, Any]:
        """Return what a command's process says; it is as little trusted as the program."""
        try:
            data = plain.receive(descriptor)
            answer = {} if data is None else plain.decode(data)
        except (OSError, plain.PlainError):
            return {}
        return answer if isinstance(answer, dict) and type(answer.get("code")) is int else {}


def _memory_file(content: bytes) -> BinaryIO:
    """Return an open file in memory. A message could not have a content of any size."""
    file = os.fdopen(os.memfd_create("content"), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _command_task(command: SandboxCommand) -> dict[str, Any]:
    return {
        "argv": list(command.argv),
        "files": list(command.files),
        "makes": command.makes,
        "environment": environment(),
    }


# ---- program that answers calls
#
# Nothing that it sends is trusted.


_LONG_S = 0.2  # a call that took less shares its limits with the next


class ProgramRaised(Exception):
    """The program raised an exception, or has ended (``gone``). ``reason``: one of ``settings.REASONS``."""

    def __init__(self, reason: str, message: str, *, gone: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.gone = gone


class Program:
    """A program that answers calls."""

    def __init__(self, child: SandboxChild, link: socket.socket) -> None:
        self._child = child
        self._link = link
        self._loaded = False

    @property
    def time_s(self) -> float:
        """Return its time since its start; once it has ended, without the time in which it had no processor."""
        ended = self._child.ended
        return time.monotonic() - self._child.born if ended is None else ended.own_s

    def call(self, name: str, arguments: list[Any], most: int = plain.MAX_FRAME) -> Any:
        """Return the plain data that a function returns, of at most ``most`` bytes. Raises ProgramRaised."""
        if not self._loaded:
            self._receive(most)
            self._loaded = True
        if time.monotonic() - self._child.begin > _LONG_S:
            self._child.mark()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            plain.send(self._link.fileno(), plain.encode(("call", name, arguments, {})))
        return self._receive(most)

    def _receive(self, most: int) -> Any:
        descriptor, begin = self._link.fileno(), time.monotonic()
        try:
            data = plain.receive(descriptor, most, lambda: self._wait(descriptor, begin))
            if data is None:
                raise self._gone()
            answer = plain.decode(data)
        except ConnectionResetError:
            raise self._gone() from None
        except plain.TooLongError:
            raise ProgramRaised(OUTPUT, "the result is too long") from None
        except plain.PlainError as error:
            raise ProgramRaised(CRASHED, str(error)) from None
        match answer:
            case ("ok", result):
                return result
            case ("raised", [str() as name, *_], str() as text):
                reason = MEMORY if name == "MemoryError" else CRASHED
                raise ProgramRaised(reason, f"{name}: {text}"[:300], gone=not self._loaded)
        raise ProgramRaised(CRASHED, "the result cannot be read")

    def _wait(self, descriptor: int, begin: float) -> None:
        """Wait until the program sends something. Raises ProgramRaised if this call takes too long."""
        left_s = max(0.0, self._child.limits.wall_s - (time.monotonic() - begin))
        while not select.select([descriptor], [], [], min(left_s, self._child.left_s))[0]:
            left_s = self._child.limits.wall_s - self._child.own_s(begin)
            if left_s <= 0:
                self._child.kill(WALL)
                raise ProgramRaised(WALL, "no result in time")
            if self._child.left_s <= 0:
                raise self._child.zygote.starved(self._child)

    def _gone(self) -> ProgramRaised:
        """Return why the program has ended, or has closed its end of the link."""
        ended = self._child.zygote.last(self._child)
        return ProgramRaised(ended.reached or CRASHED, "the program ended")


# ---- the zygote as the outside sees it: started when it is needed; it starts, watches and kills programs
#
# ``send`` and the like raise SandboxError if the zygote fails; the next program gets another one.


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
        self.zygote.look_until(lambda: self.waited_s is not None or self.ended is not None, _END_S)
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
        self.look_until(lambda: child.ended is not None, seconds)
        if child.ended is None:
            self.send({"kill": child.number})
            self.look_until(lambda: child.ended is not None, _END_S)
        if child.ended is None:
            raise self.failed("a killed program did not end")
        return child.ended

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
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.enter_context(ours)
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
            unless_started.pop_all()
        self._control = ours
        ready, _, _ = select.select([ours], [], [], START_S)
        said = ours.recv(MAX_MESSAGE) if ready else b""
        if not said:
            assert self._process is not None and self._process.stderr is not None
            self._process.kill()
            text = self._process.stderr.read(4000).decode("utf-8", "replace").split("\n")
            words = next((line.strip() for line in reversed(text) if line.strip()), "it said nothing")
            is_denied = self._settings.isolation != NONE and NOT_ALLOWED.search(words)
            raise self.failed(f"did not start: {words}" + (f": {ALLOW}" if is_denied else ""))
        return ours

    def send(self, message: dict[str, Any]) -> None:
        """Tell the zygote. Raises SandboxError."""
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        try:
            self._control.sendall(json.dumps(message).encode())
        except OSError as error:
            raise self.failed(f"cannot be told: {error}") from None

    def look_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Read what the zygote says until the condition holds, for at most ``seconds``."""
        until = time.monotonic() + seconds
        while not condition() and (left := until - time.monotonic()) > 0:
            self.look(left)

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

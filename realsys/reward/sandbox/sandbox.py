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
import os
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from realsys.errors import DataError
from realsys.reward.sandbox.inside import plain
from realsys.reward.sandbox.settings import (
    CRASHED,
    MEMORY,
    OUTPUT,
    WALL,
    WRONG,
    IsolationSettings,
    Output,
    RunLimits,
    UnitTestsResult,
    environment,
)
from realsys.reward.sandbox.zygote_process import SandboxChild, ZygoteProcess

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
            if (
                child.ended is not None
            ):  # without isolation, what it started may still hold the pipes: never wait for it
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
        content = _content(made) if made and answer.get("made") else None
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


def _content(file: BinaryIO) -> bytes:
    """Return the content of a file that no process writes any more."""
    file.seek(0)
    return file.read()


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
        descriptor = self._link.fileno()
        begin = time.monotonic()
        data = bytearray()
        wanted = plain.LENGTH.size
        while len(data) < wanted:
            self._wait(descriptor, begin)
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

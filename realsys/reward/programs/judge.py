"""Runs the tests of a program in the sandbox: all of its kinds, one after another.

    stdio   one run per test; the output is compared here
    calls   one process answers all calls; its results are plain data, which is compared here
    source  one process runs the tests and calls the program, which is in another process

`error-is-not-data`: a failure of the sandbox raises SandboxError. A program over a limit is wrong, for that reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from realsys.data.layouts.code_tests import CallTest, CodeTests
from realsys.reward.programs.comparison import same_output, same_value
from realsys.reward.programs.completion import PYTHON, callable_in
from realsys.sandbox.languages import Language, find_command
from realsys.sandbox.limits import CRASHED, MEMORY, WALL, WRONG, Limits
from realsys.sandbox.sandbox import Command, Sandbox, UnitTests
from realsys.sandbox.served_program import Program, ProgramRaised

_COMPILE = Limits(cpu_s=30.0, wall_s=45.0, memory_mb=2048.0, processes=64, open_files=64, bound_address_space=False)
_ROOM = 1 << 18  # bytes of a result, and of what the program prints besides
_OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc", "OutOfMemoryError")


@dataclass(slots=True)
class Score:
    """Tests that a program passed, and why it failed the first that it failed. ``time_s``: of all its runs."""

    tests: int
    passed: int = 0
    reason: str = ""
    time_s: float = 0.0

    def add(self, reason: str) -> None:
        """Add a test; "": it passed."""
        if reason:
            self.reason = self.reason or reason
        else:
            self.passed += 1


class Judge:
    """Judges programs with one sandbox. ``total_s``: bound on the time of all runs of one program together."""

    def __init__(self, sandbox: Sandbox, limits: Limits, total_s: float, languages: Mapping[str, Language]) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._total_s = total_s
        self._languages = languages

    def score(self, source: str, tests: CodeTests, *, all_tests: bool) -> Score:
        """Run the tests: ``all_tests``, or up to the first that fails. Raises SandboxError."""
        score = Score(len(tests.stdio) + len(tests.calls) + bool(tests.source.strip()))
        with contextlib.closing(self._reasons(source, tests, score)) as reasons:
            for reason in reasons:
                score.add(reason)
                if reason and not all_tests:
                    break
        return score

    def _reasons(self, source: str, tests: CodeTests, score: Score) -> Generator[str, None, None]:
        """Run one test after another; yield why each failed, "" if it passed."""
        yield from self._stdio(source, tests, score)
        if tests.calls:
            yield from self._calls(source, tests, score)
        if tests.source.strip():
            limits = self._limits_of(tests, score)
            if limits is None:
                yield WALL
                return
            trusted = (tests.preamble, tests.stub)
            yield self._sandbox.test(source, UnitTests(tests.source, tests.function, trusted), limits).reason

    def _limits_of(self, tests: CodeTests, score: Score) -> Limits | None:
        """Return the limits of the next run; None if the program has used its time."""
        left_s = self._total_s - score.time_s
        if left_s <= 0:
            return None
        own = self._limits
        cpu_s = min(own.cpu_s, tests.time_limit_s or own.cpu_s)
        wall_s = min(own.wall_s, 2 * cpu_s + 1.0, left_s)
        memory_mb = min(own.memory_mb, tests.memory_limit_mb or own.memory_mb)
        return dataclasses.replace(own, cpu_s=cpu_s, wall_s=wall_s, memory_mb=memory_mb)

    # ---- input and output

    def _stdio(self, source: str, tests: CodeTests, score: Score) -> Generator[str, None, None]:
        program: str | Command = source
        language = self._languages[tests.language] if tests.language != PYTHON else None
        if language is not None and tests.stdio:
            program, reason = self._built(source, language, score)
            if reason:
                yield from [reason] * len(tests.stdio)
                return
        for test in tests.stdio:
            limits = self._limits_of(tests, score)
            if limits is None:
                yield WALL
                continue
            if language is not None and language.reserves:
                limits = dataclasses.replace(limits, bound_address_space=False, processes=max(64, limits.processes))
            limits = dataclasses.replace(limits, output_mb=min(limits.output_mb, _most(test.stdout) / (1 << 20)))
            output = self._sandbox.run(program, test.stdin.encode("utf-8", "surrogatepass"), limits)
            score.time_s += output.ended.own_s
            if reason := output.ended.reason:
                yield MEMORY if reason == CRASHED and _out_of_memory(output.stderr) else reason
            else:
                yield "" if same_output(output.stdout.decode("utf-8", "replace"), test.stdout) else WRONG

    def _built(self, source: str, language: Language, score: Score) -> tuple[Command, str]:
        """Return the command that runs a program, and "", or why the program cannot be compiled."""
        files = {language.source: source.encode("utf-8", "surrogatepass")}
        if language.compile:
            output = self._sandbox.run(Command(_argv(language.compile), files, language.makes), b"", _COMPILE)
            score.time_s += output.ended.own_s
            if output.ended.reason or output.made is None:
                return Command((), {}), output.ended.reason or CRASHED
            files = {language.makes: output.made}
        return Command(_argv(language.run), files), ""

    # ---- calls

    def _calls(self, source: str, tests: CodeTests, score: Score) -> Generator[str, None, None]:
        """Call the function for each test. A process that has ended, or is over a limit, gets a successor."""
        todo = list(tests.calls)
        while todo:
            limits = self._limits_of(tests, score)
            if limits is None:
                yield from [WALL] * len(todo)
                return
            with self._sandbox.serve(source, limits) as program:
                yield from _calls_of_one(
                    program, callable_in(source, tests.function), todo, limits, self._total_s - score.time_s
                )
            score.time_s += program.time_s


def _calls_of_one(
    program: Program, function: str, todo: list[CallTest], limits: Limits, left_s: float
) -> Generator[str, None, None]:
    """Take calls from ``todo`` until the process has ended, or has used ``left_s``."""
    while todo and program.time_s < left_s:
        reason, gone = _call(program, function, todo.pop(0), limits)
        yield reason
        if gone:
            return


def _call(program: Program, function: str, test: CallTest, limits: Limits) -> tuple[str, bool]:
    """Return why a call fails its test, "" if it passes, and True if the program has ended."""
    most = min(_most(json.dumps(test.result)), int(limits.output_mb * (1 << 20)))
    try:
        result = program.call(function, test.args, most)
    except ProgramRaised as raised:
        return raised.reason, raised.gone
    right = same_value(result, test.result) or (test.wrapped and same_value(result, test.result[0]))
    return "" if right else WRONG, False


def _most(expected: str) -> int:
    """Return more bytes than any right result has. Reading more would only cost this process time."""
    return _ROOM + 8 * len(expected)


def _argv(words: list[str]) -> tuple[str, ...]:
    found = words[0] if words[0].startswith("./") else find_command(words[0])
    return (found or words[0], *words[1:])


def _out_of_memory(stderr: bytes) -> bool:
    last = stderr.rstrip().rpartition(b"\n")[2].decode("utf-8", "replace")
    return any(name in last for name in _OUT_OF_MEMORY)

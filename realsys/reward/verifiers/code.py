"""The verifier ``code``: the program in a completion passes all tests of its row, in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from realsys.config.schema import Config
from realsys.data.lines import CallTest, CodeTests, code_tests_of
from realsys.errors import MALFORMED, ConfigError, DataError, SandboxError
from realsys.reward.final_answers import after_thinking
from realsys.reward.sandbox.inside import unit_tests
from realsys.reward.sandbox.sandbox import Program, ProgramRaised, Sandbox, SandboxCommand, UnitTests
from realsys.reward.sandbox.settings import (
    AVAILABLE,
    CRASHED,
    ISOLATIONS,
    MEMORY,
    NO_PROGRAM,
    REASONS,
    WALL,
    WRONG,
    IsolationSettings,
    Language,
    RunLimits,
    find_command,
    language_problem,
    languages_of,
)
from realsys.reward.verifiers.contract import Item, Verdict, declare

ALL, SHARE = "all", "share"
#: the verifier process has 4 GiB of addresses, and programs inherit that limit
MAX_MEMORY_MB = 4096.0
_MARGIN_S = 5.0  # between total_s and the time limit of the verifier process
TOTAL_S = 40.0  # default; rollout.reward.elapsed_timeout_s is 60 by default
_DEFAULTS = RunLimits()
_SMALL = "print(len(list(range(10**6))))"  # takes about 40 MB


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of the verifier: ``data.verifier_args``.

    isolation, readable  ``realsys.reward.sandbox.settings.IsolationSettings``
    reward               share: the share of tests that passed; all: right or wrong
    total_s              bound on the time of all runs of a program together; the other limits are those of
                         ``realsys.reward.sandbox.settings.RunLimits``
    languages            further languages, ``realsys.reward.sandbox.settings``
    """

    isolation: str = AVAILABLE
    reward: str = ALL
    cpu_s: float = _DEFAULTS.cpu_s
    wall_s: float = _DEFAULTS.wall_s
    total_s: float = TOTAL_S
    memory_mb: float = _DEFAULTS.memory_mb
    processes: int = _DEFAULTS.processes
    output_mb: float = _DEFAULTS.output_mb
    disk_mb: float = _DEFAULTS.disk_mb
    languages: dict[str, Any] = {}
    readable: list[str] = []

    def limits(self) -> RunLimits:
        """Return the limits of a run. Raises ValueError."""
        names = (name for name in RunLimits.__dataclass_fields__ if name in self.__struct_fields__)
        return RunLimits(**{name: getattr(self, name) for name in names})

    def settings(self) -> IsolationSettings:
        return IsolationSettings(self.isolation, tuple(self.readable))

    def program_judge(self) -> ProgramJudge:
        """Return the judge of these arguments, with the sandbox of this process."""
        return ProgramJudge(_sandbox(self.settings()), self.limits(), self.total_s, languages_of(self.languages))


def check_answer(item: Item, **arguments: Any) -> str | None:
    """Return why the tests of a row cannot be used; None if they can. Runs the reference solution, if the row has one.

    Raises SandboxError.
    """
    given = msgspec.convert(arguments, Arguments)
    try:
        tests = code_tests_of(item.extra)
    except DataError as error:
        return str(error)
    if tests.language == PYTHON:
        return _python_problem(tests) or _reference_problem(item.answer, tests, given)
    if tests.calls or tests.source.strip():
        return f"tests of a program in {tests.language} must be stdio: calls and source are for python"
    return language_problem(languages_of(given.languages), tests.language, given.settings())


def _python_problem(tests: CodeTests) -> str | None:
    if not tests.source.strip():
        return None
    return unit_tests.problem_of(tests.source, tests.function, (tests.preamble, tests.stub))


def _reference_problem(answer: str, tests: CodeTests, given: Arguments) -> str | None:
    source = reference_in(answer, tests)
    if source is None:
        return None
    try:
        reason = given.program_judge().score(source, tests, all_tests=False).reason
    except DataError as error:
        return str(error)
    return f"the reference solution in its answer fails the tests ({reason})" if reason else None


@declare(check_answer=check_answer)
def code(item: Item, **arguments: Any) -> Verdict:
    """Run the tests of a row on the program of a completion. ``arguments``: those of ``Arguments``.

    Raises DataError for a row without tests that judge, and SandboxError.
    """
    given = msgspec.convert(arguments, Arguments)
    tests = code_tests_of(item.extra)
    judge = given.program_judge()
    if tests.language != PYTHON:
        languages = languages_of(given.languages)
        if problem := language_problem(languages, tests.language, given.settings()):
            raise SandboxError(problem)
    source = program_in(item.completion, tests)
    if source is None:
        return _verdict(0.0, NO_PROGRAM, given.reward)
    score = judge.score(source, tests, all_tests=given.reward == SHARE)
    return _verdict(score.passed / score.tests, score.reason, given.reward)


def check_settings(arguments: Mapping[str, Any], config: Config) -> str | None:
    """Return why the settings cannot be used on this machine; None if they can. Runs a program in the sandbox."""
    try:
        given = msgspec.convert(dict(arguments), Arguments)
        limits = given.limits()
        languages_of(given.languages)
    except MALFORMED as error:
        # msgspec puts the argument last: ``memory_mb: Expected `float`, got `str` ``
        text, _, path = str(error).partition(" - at `$.")
        return f"{path.rstrip('`')}: {text}" if path else text
    except ConfigError as error:
        return f"{error.field}: {error.problem}"
    except ValueError as error:
        return str(error)
    if given.isolation not in ISOLATIONS:
        return f"isolation must be one of {', '.join(ISOLATIONS)}"
    if given.reward not in (ALL, SHARE):
        return f"reward must be {ALL} or {SHARE}"
    problem = _limits_problem(limits, given.total_s, config.rollout.reward.elapsed_timeout_s)
    return problem or _isolation_problem(given.settings(), limits)


def _limits_problem(limits: RunLimits, total_s: float, elapsed_timeout_s: float) -> str | None:
    if limits.memory_mb > MAX_MEMORY_MB:
        return f"memory_mb is {limits.memory_mb:g}: it must be at most {MAX_MEMORY_MB:g}"
    if not limits.cpu_s <= limits.wall_s <= total_s:
        values = f"{limits.cpu_s:g}, {limits.wall_s:g} and {total_s:g}"
        return f"cpu_s, wall_s and total_s are {values}: none may be less than the one before"
    if total_s + _MARGIN_S > elapsed_timeout_s:
        least = f"rollout.reward.elapsed_timeout_s ({elapsed_timeout_s:g}) must be {_MARGIN_S:g} s more at least"
        return f"total_s is {total_s:g}: {least}"
    return None


def _isolation_problem(settings: IsolationSettings, limits: RunLimits) -> str | None:
    try:
        with Sandbox(settings) as sandbox:
            ended = sandbox.run(_SMALL, b"", limits).ended
    except SandboxError as error:
        return f"{error}, or set isolation to none: then a program can read and change what you can"
    if not ended.reason:
        return None
    return f"the limits are too small: a program that makes a list of a million numbers fails ({ended.reason})"


def _verdict(share: float, reason: str, reward: str) -> Verdict:
    """Make the verdict. Its metrics: the share of tests that passed, and why the program failed."""
    reasons = {name: float(name == reason) for name in REASONS if name != WRONG}
    metrics = {"tests_passed": share, **{f"program_{name}": value for name, value in reasons.items()}}
    return Verdict(share if reward == SHARE else None, correct=share == 1.0, metrics=metrics)


@functools.cache
def _sandbox(settings: IsolationSettings) -> Sandbox:
    """Return the sandbox of this process. It ends with the process."""
    return Sandbox(settings)


# ---- running the tests of a program in the sandbox, one kind after another
#
#     stdio   one run per test; the output is compared here
#     calls   one process answers all calls; its results are plain data, which is compared here
#     source  one process runs the tests and calls the program, which is in another process
#
# `error-is-not-data`: a failure of the sandbox raises SandboxError. A program over a limit is wrong, for that reason.


_COMPILE = RunLimits(cpu_s=30.0, wall_s=45.0, memory_mb=2048.0, processes=64, open_files=64, bound_address_space=False)
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


class ProgramJudge:
    """Judges programs with one sandbox. ``total_s``: bound on the time of all runs of one program together."""

    def __init__(self, sandbox: Sandbox, limits: RunLimits, total_s: float, languages: Mapping[str, Language]) -> None:
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

    def _limits_of(self, tests: CodeTests, score: Score) -> RunLimits | None:
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
        program: str | SandboxCommand = source
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

    def _built(self, source: str, language: Language, score: Score) -> tuple[SandboxCommand, str]:
        """Return the command that runs a program, and "", or why the program cannot be compiled."""
        files = {language.source: source.encode("utf-8", "surrogatepass")}
        if language.compile:
            output = self._sandbox.run(SandboxCommand(_argv(language.compile), files, language.makes), b"", _COMPILE)
            score.time_s += output.ended.own_s
            if output.ended.reason or output.made is None:
                return SandboxCommand((), {}), output.ended.reason or CRASHED
            files = {language.makes: output.made}
        return SandboxCommand(_argv(language.run), files), ""

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
    program: Program, function: str, todo: list[CallTest], limits: RunLimits, left_s: float
) -> Generator[str, None, None]:
    """Take calls from ``todo`` until the process has ended, or has used ``left_s``."""
    while todo and program.time_s < left_s:
        reason, gone = _call(program, function, todo.pop(0), limits)
        yield reason
        if gone:
            return


def _call(program: Program, function: str, test: CallTest, limits: RunLimits) -> tuple[str, bool]:
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


# ---- finding the program in a completion
#
# The program is the last fenced block behind the thinking part, or a continuation of the stub.


_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*$", re.M)
PYTHON = "python"


def program_in(completion: str, tests: CodeTests) -> str | None:
    """Return the whole program of a completion; None if it has none, or its thinking part has not ended."""
    text = after_thinking(completion)
    if text is None:
        return None
    block = last_block(text)
    if tests.language != PYTHON:
        return None if block is None else tests.preamble + block
    if block is None:
        if not tests.stub and not _parses(text):
            return None  # prose
        block = text
    return whole_program(block, tests)


def last_block(text: str) -> str | None:
    """Return the content of the last fenced block; None without one. A block that is not closed ends with the text."""
    blocks = []
    at = 0
    while (opening := _FENCE.search(text, at)) is not None:
        begin = opening.end() + 1
        mark = re.escape(opening[1])
        closing = re.compile(rf"^[ \t]*{mark}[`~]*[ \t]*$", re.M).search(text, begin)
        blocks.append(text[begin : closing.start() if closing else len(text)])
        if closing is None:
            break
        at = closing.end()
    return blocks[-1] if blocks else None


def reference_in(answer: str, tests: CodeTests) -> str | None:
    """Return the whole program of a reference solution; None if the answer of a row is no Python program."""
    source = whole_program(answer, tests)
    if tests.language != PYTHON or not answer.strip() or not _parses(source):
        return None
    if name := tests.function.partition(".")[0]:
        return source if _defines(source, name) else None
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Call)
    return source if any(isinstance(each, kinds) for each in ast.walk(ast.parse(source))) else None


def callable_in(source: str, function: str) -> str:
    """Return the name to call: that of a method if the program has the function in a ``class Solution`` only."""
    if "class Solution" in source and not _defines(source, function.partition(".")[0]):
        return f"Solution.{function}"
    return function


def whole_program(block: str, tests: CodeTests) -> str:
    """Put what the prompt gives before the block, unless the block has it."""
    if tests.stub and not _defines(block, tests.function.partition(".")[0]):
        joint = "" if tests.stub.endswith("\n") else "\n"
        continued = tests.stub + joint + block
        if _parses(continued):
            return continued
    return f"{tests.preamble}\n{block}" if tests.preamble else block


def _defines(block: str, name: str) -> bool:
    """Return True if the block is source that defines the name."""
    if not _parses(block):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(block).body
    defined = {each.name for each in body if isinstance(each, kinds)}
    defined |= {t.id for each in body if isinstance(each, ast.Assign) for t in each.targets if isinstance(t, ast.Name)}
    return name in defined if name else bool(defined)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# ---- comparing results with those of the tests (docs/sandbox.md has the rules)


RELATIVE, ABSOLUTE = 1e-6, 1e-9  # bounds on the difference of two floats
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def same_output(actual: str, expected: str) -> bool:
    """Compare two outputs, without spaces at the ends of lines and without empty lines at the end.

    A word that is written as a float in the expected output may be another text of about the same number; the
    spaces between words of such a line are free.
    """
    ours, theirs = _lines(actual), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(actual: Any, expected: Any) -> bool:
    """Compare plain data of a program with a JSON value: tuples are lists, keys are text, floats are near."""
    if isinstance(expected, list):
        return (
            isinstance(actual, (list, tuple))
            and len(actual) == len(expected)
            and all(map(same_value, actual, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return False
        keyed = {_key(key): value for key, value in actual.items()}
        same_keys = len(keyed) == len(actual) and keyed.keys() == expected.keys()
        return same_keys and all(same_value(keyed[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(actual, (int, float)) and not isinstance(actual, bool):
        return _near(actual, expected)
    if isinstance(actual, float) and type(expected) is int:
        return _near(actual, expected)
    return type(actual) is type(expected) and bool(actual == expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    ours, theirs = actual.split(), expected.split()
    if len(ours) != len(theirs) or not any(map(_FLOAT.fullmatch, theirs)):
        return False
    return all(map(_same_word, ours, theirs))


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if len(actual) > 100 or not (_FLOAT.fullmatch(expected) and _NUMBER.fullmatch(actual)):
        return False
    return _near(float(actual), float(expected))


def _near(actual: float, expected: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an integer that no float can hold
        return False


def _key(key: Any) -> Any:
    """Return a key as JSON writes it."""
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    if isinstance(key, int) and abs(key) >= 1 << 63:
        return key  # no key of a test; as text it may be too long for Python
    return repr(key) if isinstance(key, (int, float)) else key

"""The verifier ``code``: the program in a completion passes all tests of its row, in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.config.schema import Config
from realsys.data.layouts.code_tests import CodeTests, code_tests_of
from realsys.errors import MALFORMED, ConfigError, DataError, SandboxError
from realsys.reward.programs.completion import PYTHON, program_in, reference_in
from realsys.reward.programs.judge import Judge
from realsys.reward.verifiers.base import Item, Verdict, declare
from realsys.sandbox.inside import unit_tests
from realsys.sandbox.isolation import AVAILABLE, ISOLATIONS, Settings
from realsys.sandbox.languages import languages_of
from realsys.sandbox.languages import problem_of as language_problem
from realsys.sandbox.limits import NO_PROGRAM, REASONS, WRONG, Limits
from realsys.sandbox.sandbox import Sandbox

ALL, SHARE = "all", "share"
#: the verifier process has 4 GiB of addresses, and programs inherit that limit
MAX_MEMORY_MB = 4096.0
_MARGIN_S = 5.0  # between total_s and the time limit of the verifier process
TOTAL_S = 40.0  # default; rollout.reward.elapsed_timeout_s is 60 by default
_DEFAULTS = Limits()
_SMALL = "print(len(list(range(10**6))))"  # takes about 40 MB


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of the verifier: ``data.verifier_args``.

    isolation, readable  ``realsys.sandbox.isolation.Settings``
    reward               share: the share of tests that passed; all: right or wrong
    total_s              bound on the time of all runs of a program together; the other limits are those of
                         ``realsys.sandbox.limits.Limits``
    languages            further languages, ``realsys.sandbox.languages``
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

    def limits(self) -> Limits:
        """Return the limits of a run. Raises ValueError."""
        names = (name for name in Limits.__dataclass_fields__ if name in self.__struct_fields__)
        return Limits(**{name: getattr(self, name) for name in names})

    def settings(self) -> Settings:
        return Settings(self.isolation, tuple(self.readable))

    def judge(self) -> Judge:
        """Return the judge of these arguments, with the sandbox of this process."""
        return Judge(_sandbox(self.settings()), self.limits(), self.total_s, languages_of(self.languages))


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
        reason = given.judge().score(source, tests, all_tests=False).reason
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
    judge = given.judge()
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
        return _named(error)
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


def _named(error: Exception) -> str:
    """Return a message of msgspec with the argument in front: ``memory_mb: Expected `float`, got `str` ``."""
    text, _, path = str(error).partition(" - at `$.")
    return f"{path.rstrip('`')}: {text}" if path else text


def _limits_problem(limits: Limits, total_s: float, elapsed_timeout_s: float) -> str | None:
    if limits.memory_mb > MAX_MEMORY_MB:
        return f"memory_mb is {limits.memory_mb:g}: it must be at most {MAX_MEMORY_MB:g}"
    if not limits.cpu_s <= limits.wall_s <= total_s:
        values = f"{limits.cpu_s:g}, {limits.wall_s:g} and {total_s:g}"
        return f"cpu_s, wall_s and total_s are {values}: none may be less than the one before"
    if total_s + _MARGIN_S > elapsed_timeout_s:
        least = f"rollout.reward.elapsed_timeout_s ({elapsed_timeout_s:g}) must be {_MARGIN_S:g} s more at least"
        return f"total_s is {total_s:g}: {least}"
    return None


def _isolation_problem(settings: Settings, limits: Limits) -> str | None:
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
def _sandbox(settings: Settings) -> Sandbox:
    """Return the sandbox of this process. It ends with the process."""
    return Sandbox(settings)

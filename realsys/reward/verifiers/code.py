"""The verifier ``code``: the program in a completion passes all tests of its row, in the sandbox (docs/sandbox.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from realsys.config.schema import Config
from realsys.data.layouts.code_tests import CodeTests, code_tests_of
from realsys.errors import ConfigError, DataError, SandboxError
from realsys.reward.programs.completion import PYTHON, program_in
from realsys.reward.programs.judge import Judge
from realsys.reward.verifiers.base import Item, Verdict, declare
from realsys.sandbox import languages as other_languages
from realsys.sandbox.inside import unit_tests
from realsys.sandbox.isolation import AVAILABLE, ISOLATIONS, Settings
from realsys.sandbox.limits import NO_PROGRAM, REASONS, WRONG, Limits
from realsys.sandbox.sandbox import Sandbox

ALL, SHARE = "all", "share"
#: the verifier process has 4 GiB of addresses, and programs inherit that limit
MAX_MEMORY_MB = 4096.0
_MARGIN_S = 5.0  # between total_s and the time limit of the verifier process
TOTAL_S = 40.0  # default; rollout.reward.elapsed_timeout_s is 60 by default
_DEFAULTS = Limits()


def check_answer(item: Item, *, languages: Mapping[str, Any] | None = None) -> str | None:
    """Return why the tests of a row cannot be used; None if they can."""
    try:
        tests = code_tests_of(item.extra)
    except DataError as error:
        return str(error)
    if tests.language == PYTHON:
        return _python_problem(tests)
    if tests.calls or tests.source.strip():
        return f"tests of a program in {tests.language} must be stdio: calls and source are for python"
    return other_languages.problem_of(other_languages.languages_of(languages or {}), tests.language)


def _python_problem(tests: CodeTests) -> str | None:
    if not tests.source.strip():
        return None
    return unit_tests.problem_of(tests.source, tests.function, (tests.preamble, tests.stub))


@declare(check_answer=check_answer)
def code(
    item: Item,
    *,
    isolation: str = AVAILABLE,
    reward: str = ALL,
    cpu_s: float = _DEFAULTS.cpu_s,
    wall_s: float = _DEFAULTS.wall_s,
    total_s: float = TOTAL_S,
    memory_mb: float = _DEFAULTS.memory_mb,
    processes: int = _DEFAULTS.processes,
    output_mb: float = _DEFAULTS.output_mb,
    disk_mb: float = _DEFAULTS.disk_mb,
    languages: Mapping[str, Any] | None = None,
    readable: tuple[str, ...] | list[str] = (),
) -> Verdict:
    """Run the tests of a row on the program of a completion.

    ``reward=share``: the reward is the share of tests that passed; ``all``: right or wrong. ``isolation``,
    ``readable``: ``realsys.sandbox.isolation.Settings``; the limits: ``realsys.sandbox.limits.Limits``; ``total_s``: of
    all runs together. Raises DataError for a row without tests, and SandboxError.
    """
    limits = Limits(cpu_s, wall_s, memory_mb, processes, output_mb, disk_mb=disk_mb)
    tests = code_tests_of(item.extra)
    known = other_languages.languages_of(languages or {})
    if tests.language != PYTHON and (problem := other_languages.problem_of(known, tests.language)):
        raise SandboxError(problem)
    judge = Judge(_sandbox(Settings(isolation, tuple(readable))), limits, total_s, known)
    source = program_in(item.completion, tests)
    if source is None:
        return _verdict(0.0, NO_PROGRAM, reward)
    score = judge.score(source, tests, all_tests=reward == SHARE)
    return _verdict(score.passed / score.tests, score.reason, reward)


def check_settings(arguments: Mapping[str, Any], config: Config) -> str | None:
    """Return why the settings cannot be used on this machine; None if they can. Runs a program in the sandbox."""
    given = {"isolation": AVAILABLE, "reward": ALL, "total_s": TOTAL_S, "readable": (), **arguments}
    if given["isolation"] not in ISOLATIONS:
        return f"isolation must be one of {', '.join(ISOLATIONS)}"
    if given["reward"] not in (ALL, SHARE):
        return f"reward must be {ALL} or {SHARE}"
    try:
        limits = Limits(**{name: given[name] for name in Limits.__dataclass_fields__ if name in given})
        other_languages.languages_of(given.get("languages") or {})
        problem = _limits_problem(limits, float(given["total_s"]), config.rollout.reward.elapsed_timeout_s)
    except (TypeError, ValueError, ConfigError) as error:
        return str(error)
    return problem or _isolation_problem(Settings(given["isolation"], tuple(given["readable"])))


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


def _isolation_problem(settings: Settings) -> str | None:
    try:
        with Sandbox(settings) as sandbox:
            output = sandbox.run("print(1)", b"", _DEFAULTS)
    except SandboxError as error:
        return f"{error}, or set isolation to none: then a program can read and change what you can"
    return None if output.stdout == b"1\n" else f"the sandbox does not run programs: {output.stderr[-200:]!r}"


def _verdict(share: float, reason: str, reward: str) -> Verdict:
    """Make the verdict. Its metrics: the share of tests that passed, and why the program failed."""
    reasons = {name: float(name == reason) for name in REASONS if name != WRONG}
    metrics = {"tests_passed": share, **{f"program_{name}": value for name, value in reasons.items()}}
    return Verdict(share if reward == SHARE else None, correct=share == 1.0, metrics=metrics)


@functools.cache
def _sandbox(settings: Settings) -> Sandbox:
    """Return the sandbox of this process. It ends with the process."""
    return Sandbox(settings)

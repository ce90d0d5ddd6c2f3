"""Judgement of a program, with a sandbox that only answers."""

import contextlib

import pytest

from realsys.data.lines import CallTest, CodeTests, StdioTest
from realsys.errors import SandboxError
from realsys.reward.sandbox.sandbox import ProgramRaised
from realsys.reward.sandbox.settings import (
    CPU,
    CRASHED,
    MEMORY,
    OUTPUT,
    WALL,
    WRONG,
    Output,
    RunEnded,
    RunLimits,
    UnitTestsResult,
)
from realsys.reward.verifiers.code import ProgramJudge

STDIO = CodeTests(stdio=[StdioTest("1", "2"), StdioTest("2", "4"), StdioTest("3", "6")], time_limit_s=2.0)
CALLS = CodeTests(function="f", calls=[CallTest([1], 2), CallTest([2], 4), CallTest([3], 6)])


class FakeSandbox:
    """Gives the answers in their order; notes the limits of each run."""

    def __init__(self, *answers, seconds=0.1):
        self.answers = list(answers)
        self.limits = []
        self.seconds = self.time_s = seconds

    def run(self, program, stdin, limits):
        self.limits.append(limits)
        answer = self.answers.pop(0)
        if isinstance(answer, RunEnded):
            return Output(answer, b"", b"Traceback\nMemoryError\n" if answer.code == 1 else b"")
        return Output(RunEnded(0, wall_s=self.seconds), answer, b"")

    def test(self, source, tests, limits):
        return self.answers.pop(0)

    @contextlib.contextmanager
    def serve(self, source, limits):
        self.limits.append(limits)
        yield self

    def call(self, name, arguments, most):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def score(sandbox, tests, *, all_tests=False, total_s=10.0, limits=None):
    found = ProgramJudge(sandbox, limits or RunLimits(), total_s, {}).score("program", tests, all_tests=all_tests)
    return found.passed, found.reason


def test_right_program_passes_all():
    assert score(FakeSandbox(b"2\n", b"4\n", b"6\n"), STDIO) == (3, "")
    assert score(FakeSandbox(2, 4, 6), CALLS) == (3, "")


def test_first_failure_ends_the_judgement():
    assert score(FakeSandbox(b"2\n", b"5\n"), STDIO) == (1, WRONG)


def test_share_needs_all_tests():
    assert score(FakeSandbox(b"2\n", b"5\n", b"6\n"), STDIO, all_tests=True) == (2, WRONG)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [(RunEnded(-9, CPU), CPU), (RunEnded(1), MEMORY), (RunEnded(3), CRASHED), (RunEnded(0, OUTPUT), OUTPUT)],
)
def test_failed_run_has_a_reason(ended, reason):
    assert score(FakeSandbox(ended), STDIO) == (0, reason)


def test_program_that_used_its_time_is_wrong():
    sandbox = FakeSandbox(b"2\n", b"4\n", b"6\n", seconds=3.0)
    assert score(sandbox, STDIO, total_s=5.0) == (2, WALL)
    assert [limits.wall_s for limits in sandbox.limits] == [5.0, 2.0]


def test_limits_of_the_row_only_lower():
    sandbox = FakeSandbox(b"2\n", b"4\n", b"6\n")
    score(sandbox, STDIO, limits=RunLimits(cpu_s=1.0))
    assert {limits.cpu_s for limits in sandbox.limits} == {1.0}


def test_program_that_ended_is_started_again():
    sandbox = FakeSandbox(2, ProgramRaised(CPU, ""), 6)
    assert score(sandbox, CALLS, all_tests=True) == (2, CPU)
    assert len(sandbox.limits) == 2


def test_exception_of_a_call_keeps_the_program():
    sandbox = FakeSandbox(ProgramRaised(CRASHED, "", gone=False), 4, 6)
    assert score(sandbox, CALLS, all_tests=True) == (2, CRASHED)
    assert len(sandbox.limits) == 1


def test_kinds_of_tests_add_up():
    tests = CodeTests(function="f", calls=[CallTest([1], 2)], source="assert f(1) == 2", stdio=[StdioTest("", "x")])
    assert score(FakeSandbox(b"x", 2, UnitTestsResult(True)), tests) == (3, "")


def test_failure_of_the_sandbox_is_raised():
    with pytest.raises(SandboxError):
        score(FakeSandbox(SandboxError("died")), CALLS)

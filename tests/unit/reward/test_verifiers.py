"""Built-in verifiers, what counts as a verdict, and the door ``data.verifier``."""

import contextlib
import math as numbers
import threading
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

from realsys.config.doors import VERIFIER
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.config.schema import Config
from realsys.data.lines import KEY, CallTest, CodeTests, StdioTest
from realsys.errors import ConfigError, SandboxError, WaitTimeout
from realsys.reward.pool import AnswerComparer
from realsys.reward.sandbox.sandbox import ProgramRaised, Sandbox
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
from realsys.reward.verifiers import code as module
from realsys.reward.verifiers.code import (
    ProgramJudge,
    check_answer,
    check_settings,
    last_block,
    program_in,
    same_output,
    same_value,
)
from realsys.reward.verifiers.contract import MAX_METRICS, Item, Verdict, answer_problem, declare, verdict_of
from realsys.reward.verifiers.exact import exact
from realsys.reward.verifiers.math import math
from tests.support.processes.config_trees import changed

MACHINE = Machine(cpus=8, memory_bytes=64 << 30)


@pytest.mark.parametrize(("reference", "problem"), [("7", None), ("a#b", "has a #"), ('["1","2"]', "is a list")])
def test_reference_that_no_answer_of_exact_can_have(reference, problem):
    assert (problem or "None") in str(answer_problem(exact, Item("", "", reference)))


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("a0+3=3;#3", "3", True),
        ("#3", "3", True),
        ("a0+3=3;#3", "4", False),
        ("#3#3", "3", False),  # says it twice
        ("#4#3", "3", False),
        ("3", "3", False),
        ("#3 ", "3", False),
        ("#", "3", False),
        ("", "3", False),
    ],
)
def test_exact(answer, reference, right):
    assert exact(Item("", answer, reference)).correct is right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"so it is \boxed{\frac{2}{4}}", "1/2", True),
        (r"first \boxed{3}. " + "Let me look at this again. " * 6 + r"So \boxed{0.5}.", r"\frac{1}{2}", True),
        (r"\boxed{1} and \boxed{2}", "1, 2", True),  # next to each other they are parts of one answer
        (r"\boxed{3}, or \boxed{0.5}", r"\frac{1}{2}", False),
        ("the answer is $x=7$", "7", True),
        ("We get 3 and then 12.", "12", True),
        (r"\boxed{8}", "7", False),
        ("I do not know", "7", False),
        ("", "7", False),
        (r"\boxed{(1,2)}", "$(1, 2)$", True),
    ],
)
def test_math(answer, reference, right):
    assert math(Item("", answer, reference)).correct is right


def test_math_works_outside_the_main_thread():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math(Item("", r"\boxed{7}", "7")).correct))
    thread.start()
    thread.join(60)
    assert verdicts == [True]


@pytest.mark.parametrize(
    ("completion", "correct", "bonus"),
    [
        (r"<think>3+4</think>\boxed{7}", True, 0.5),
        (r"<think>3+4</think>\boxed{8}", False, 0.5),
        (r"\boxed{7}", True, 0.0),
    ],
)
def test_format_reward_is_added(completion, correct, bonus):
    verdict = math(Item("", completion, "7"), format_reward=0.5)
    assert verdict == Verdict(None, correct, {"format": bonus / 0.5}, bonus, "7" if correct else "8")


@pytest.mark.parametrize(
    ("verdict", "answer"),
    [
        (math(Item("", r"so it is \boxed{\frac{2}{4}}", "1/2")), r"\frac{2}{4}"),
        (math(Item("", "I do not know", "7")), None),
        (math(Item("", r"\boxed{6} or \boxed{7}", "7")), None),
        (exact(Item("", "a0+3=3;#3", "4")), "3"),
        (exact(Item("", "#3#3", "3")), None),
    ],
)
def test_verdict_has_the_final_answer(verdict, answer):
    assert verdict.answer == answer


def test_long_final_answer_is_cut():
    assert verdict_of(Verdict(correct=True, answer="x" * 5000)).answer == "x" * 2000


def test_check_answer_must_return_a_reason():
    assert answer_problem(math, Item("", "", "it depends")) and answer_problem(exact, Item("", "", "")) is None
    with pytest.raises(TypeError, match="check_answer returned False"):
        answer_problem(declare(check_answer=lambda item: False)(three), Item("", "", ""))


def test_unusable_reference_is_an_error():
    with pytest.raises(ValueError, match="no mathematical expression"):
        math(Item("", r"\boxed{7}", ""))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (True, Verdict(correct=True)),
        (False, Verdict(correct=False)),
        (0, Verdict(reward=0.0)),
        (-1.5, Verdict(reward=-1.5)),
        (np.float32(0.5), Verdict(reward=0.5)),
        (Fraction(1, 4), Verdict(reward=0.25)),
        (Verdict(2, True, {"steps": 3, "done": False}), Verdict(2.0, True, {"steps": 3.0, "done": 0.0})),
    ],
)
def test_bool_number_and_verdict_are_verdicts(result, verdict):
    checked = verdict_of(result)
    assert checked == verdict and type(checked.reward) in (float, type(None))


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned None: return a bool"),
        ("yes", "returned 'yes': return a bool"),
        (np.bool_(True), "return a bool, a finite number or a Verdict"),
        (numbers.nan, "returned nan: must be a finite number"),
        (10**400, "must be a finite number"),
        (Verdict(), "neither reward nor correct"),
        (Verdict(reward=numbers.inf), "reward inf: must be a finite number"),
        (Verdict(correct=True, bonus=numbers.nan), "bonus nan: must be a finite number"),
        (1e9, "returned 1000000000.0: must be from -1e+06 to 1e+06"),
        (Verdict(reward=-1e308, bonus=-1e308), "reward -1e+308: must be from"),
        (Verdict(correct=True, bonus=2e6), "bonus 2000000.0: must be from"),
        (Verdict(reward=True), "reward True: must be a finite number"),
        (Verdict(correct=1), "correct=1: must be True, False or None"),
        (Verdict(correct=True, answer=7), "answer=7: must be a text or None"),
        (Verdict(1.0, None, {"steps": numbers.nan}), "metric 'steps' nan"),
        (Verdict(1.0, None, {"steps": "3"}), "metric 'steps' '3'"),
        (Verdict(1.0, None, {"": 1.0}), "printable characters"),
        (Verdict(1.0, None, {"\ud800": 1.0}), "printable characters"),
        (Verdict(1.0, None, {str(k): 1.0 for k in range(MAX_METRICS + 1)}), f"at most {MAX_METRICS} names"),
    ],
)
def test_anything_else_is_an_error(result, problem):
    with pytest.raises((TypeError, ValueError)) as caught:
        verdict_of(result)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("exactly", "", "use one of code, exact, judge, math, reasoning_gym, or package.module:name"),
        ("nowhere:verify", "", "no module named 'nowhere'"),
        ("tests.support.serving.reward_verifiers:nothing", "", "has no attribute 'nothing'"),
        ("tests.support.serving.reward_verifiers:os", "", "it must be a function"),
        ("tests.unit.reward.test_verifiers:three", "", "it must take (item)"),
        ("math", "{format: 1}", "do not fit math"),
        ("code", "{total_s: 60}", "rollout.reward.elapsed_timeout_s"),
    ],
)
def test_bad_verifier_is_refused_before_start(name, arguments, problem):
    given = [f"data.verifier_args={arguments}"] if arguments else []
    with pytest.raises(ConfigError) as caught:
        check(changed(f"data.verifier={name}", *given), MACHINE)
    assert caught.value.field == ("data.verifier_args" if arguments else "data.verifier")
    assert problem in str(caught.value) and caught.value.exit_code == 2


def three(prompt, answer, reference):
    """Has the signature of an earlier contract."""


def test_own_verifier_is_configured_by_its_path():
    name = "tests.support.serving.reward_verifiers:behave"
    check(changed(f"data.verifier={name}"), MACHINE)
    assert VERIFIER.load(name)(Item("", "a", "a")) is True


# ---- Final answers compared with each other, for majority votes


class Completion(NamedTuple):
    """A completion with its final answer in a box."""

    answer: str
    prompt: str = "how much?"

    @property
    def completion(self):
        return f"so it is \\boxed{{{self.answer}}}"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [(r"\frac{1}{2}", "0.5", True), ("50\\%", "1/2", True), ("7", "8", False), ("7", "it depends", False)],
)
def test_mathematical_answers_agree_by_value(first, second, agree):
    with AnswerComparer(Config(), "math") as comparer:
        same = comparer.same_of([Completion(first), Completion(second)])
        assert same is not None and same(first, second) is agree


def test_verifier_without_comparison_compares_texts():
    with AnswerComparer(Config(), "exact") as comparer:
        assert comparer.same_of([Completion("7"), Completion("7.0")]) is None
        assert comparer._pool.restarts == 0 and not comparer._pool._running, "no process was needed"


def test_comparison_after_its_time_limit_raises():
    with AnswerComparer(Config(), "math", limit_s=-1.0) as comparer:
        same = comparer.same_of([Completion("7"), Completion("8")])
        assert same is not None
        with pytest.raises(WaitTimeout, match="comparing the final answers took more than -1 s"):
            same("7", "8")
        assert not comparer._pool._running, "no process was needed"


# ---- The verifier ``code``: references, settings, verdicts


def item(**tests):
    return Item("", "", "", {KEY: tests})


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ({}, "has no tests"),
        ({"source": "assert f( == 1"}, "is no Python"),
        ({"source": "import x\n\ndef check(f):\n    assert f() == 1"}, "line 1: nothing calls the program"),
        ({"source": "def test_a(f):\n    assert f() == 1"}, "line 1: test_a is async or takes arguments"),
        ({"source": "class TestF:\n    def test(self): assert f() == 1"}, "must derive from unittest.TestCase"),
        ({"source": "x = f()\nassert np.all(x)"}, "line 2: 'np' is not defined"),
        ({"source": "assert f() == 1", "stub": "def f( ="}, "is no Python"),
        ({"language": "c", "source": "x"}, "must be stdio"),
        ({"language": "cobol", "stdio": [{"stdin": "", "stdout": ""}]}, "'cobol' is not known"),
    ],
)
def test_useless_tests_are_refused(tests, problem):
    assert problem in check_answer(item(**tests))


def test_row_without_tests_is_refused():
    assert "not a code task" in check_answer(Item("", "", "1"))


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)\n"


@pytest.mark.parametrize(
    "source", ["assert f() == 1", "def test_a():\n    assert f() == 1", CASE, "def check(g): assert g()\ncheck(f)"]
)
def test_useful_tests_are_taken(source):
    assert check_answer(item(source=source)) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"isolation": "jail"}, "isolation must be one of full, available, none"),
        ({"reward": "half"}, "reward must be all or share"),
        ({"cpu_s": 0}, "cpu_s is 0"),
        ({"cpu_s": "x"}, "cpu_s: Expected `float`, got `str`"),
        ({"memory_mb": "1g"}, "memory_mb: Expected `float`"),
        ({"processes": 1.5}, "processes: Expected `int`"),
        ({"readable": "/opt/x"}, "readable: Expected `array`"),
        ({"readable": 5}, "readable: Expected `array`"),
        ({"languages": ["lua"]}, "languages: Expected `object`"),
        ({"disk_mb": float("inf")}, "disk_mb is inf: it must be finite"),
        ({"disk_mb": 0.5}, "disk_mb is 0.5: it must be at least 1"),
        ({"output_mb": float("inf")}, "output_mb is inf: it must be finite"),
        ({"cpu": 1}, "unknown field `cpu`"),
        ({"memory_mb": 8192}, "at most 4096"),
        ({"wall_s": 5}, "none may be less than the one before"),
        ({"total_s": 58}, r"rollout.reward.elapsed_timeout_s \(60\) must be 5 s more"),
        ({"languages": {"x": {"source": "a"}}}, "languages.x: .* missing required field"),
    ],
)
def test_wrong_settings_are_refused(arguments, problem):
    import re

    assert re.search(problem, check_settings(arguments, Config()))


def test_machine_without_isolation_is_refused(monkeypatch):
    def refuse(self, *_):
        raise SandboxError("bwrap is not found: install it")

    monkeypatch.setattr(Sandbox, "run", refuse)
    assert "install it, or set isolation to none" in check_settings({}, Config())


def test_door_names_the_field_of_settings(monkeypatch):
    from realsys.config.doors import VERIFIER

    with pytest.raises(ConfigError, match="data.verifier_args="):
        VERIFIER.check_settings("code", {"reward": "half"}, Config())
    VERIFIER.check_settings("exact", {}, Config())


def test_verdict_has_share_and_reason():
    verdict = module._verdict(0.5, "cpu", "share")
    assert (verdict.reward, verdict.correct) == (0.5, False)
    assert verdict.metrics["tests_passed"] == 0.5
    assert [name for name, value in verdict.metrics.items() if value == 1.0] == ["program_cpu"]
    assert module._verdict(1.0, "", "all").reward is None


# ---- Comparison of outputs and of plain data


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2 \r\n3\n\n", "1 2\n3", True),
        ("1  2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("3", "3.0", True),
        ("yes  0.50", "yes 0.5", True),
        ("3.0", "3", False),
        ("nan", "0.5", False),
        ("0.50001", "0.5", False),
        ("\n1", "1", False),
        ("", "", True),
        ("1" * 1000, "0.5", False),
    ],
)
def test_outputs(actual, expected, same):
    assert same_output(actual, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: (2,)}, {"1": [2]}, True),
        ({1: 2, "1": 2}, {"1": 2}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.0, 3, True),
        (True, 1, False),
        (1, True, False),
        ("1", 1, False),
        (None, None, True),
        ({1}, [1], False),
        (10**400, 1.0, False),
        (float("nan"), 1.0, False),
        ([1, 2], [1], False),
    ],
)
def test_values(actual, expected, same):
    assert same_value(actual, expected) is same


# ---- Which text of a completion is the program


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\nor\n```\nb\n```\n", "b\n"),
        ("```py\na\n", "a\n"),
        ("````md\n```\na\n```\n````\n", "```\na\n```\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("~~~\na\n~~~", "a\n"),
        ("a = `b`", None),
    ],
)
def test_last_block_counts(text, block):
    assert last_block(text) == block


# ---- Judgement of a program, with a sandbox that only answers


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


STUB = "import math\n\ndef area(r):\n    '''Area of a circle.'''\n"
BODY = "    return math.pi * r * r\n"
WHOLE = f"def area(r):\n{BODY}"
PLAIN = CodeTests(source="assert f() == 1")
CONTINUED = CodeTests(function="area", source="assert area(0) == 0", preamble="import math\n", stub=STUB)
IN_C = CodeTests(language="c", source="x")


@pytest.mark.parametrize(
    ("text", "tests", "program"),
    [
        ("<think>```python\nx=1\n```</think>\n```python\ny=2\n```", PLAIN, "y=2\n"),
        ("<think>```python\nx=1\n```", PLAIN, None),
        ("I do not know it.", PLAIN, None),
        ("def f(): return 1", PLAIN, "def f(): return 1"),
        (f"```python\n{WHOLE}```", CONTINUED, f"import math\n\n{WHOLE}"),
        (BODY, CONTINUED, STUB + BODY),
        (f"```python\n{BODY}```", CONTINUED, STUB + BODY),
        ("int main(){}", IN_C, None),
        ("```c\nint main(){}\n```", IN_C, "int main(){}\n"),
    ],
)
def test_program_is_the_text_behind_the_thinking(text, tests, program):
    """A whole function gets the preamble, a body continues the stub, and prose is no program."""
    assert program_in(text, tests) == program

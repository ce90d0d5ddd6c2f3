"""Rewards of code tasks through the pool: right, wrong, over a limit; a dead sandbox is no verdict."""

import asyncio

import psutil
import pytest

from realsys.config.schema import Config
from realsys.data.layouts import verl
from realsys.data.lines import KEY
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.code import check_settings
from realsys.reward.verifiers.contract import Item

TESTS = {"function": "f", "calls": [{"args": [2], "result": 4}, {"args": [3], "result": 6}], "time_limit_s": 0.3}

pytestmark = pytest.mark.needs("bwrap")


def item(body):
    return Item("", f"<think>hm</think>```python\ndef f(x):\n    {body}\n```", "", {KEY: TESTS})


async def verdicts(bodies, **arguments):
    pool = VerifierPool(1, ItemLimits(10.0, 60.0), {"code": arguments})
    try:
        return await asyncio.gather(*(pool.verify("code", item(body)) for body in bodies))
    finally:
        await pool.close()


def test_programs_are_right_or_wrong():
    right, wrong, slow = asyncio.run(verdicts(["return 2 * x", "return x", "while True: pass"]))
    assert [right.correct, wrong.correct, slow.correct] == [True, False, False]
    assert [right.metrics["program_cpu"], slow.metrics["program_cpu"]] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("truth", "program", "right"),
    [
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, "def f(a, b): return a + b", True),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, "def f(a, b): return [a + b]", True),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[4]]}, "def f(a, b): return a + b", False),
        ({"fn_name": "f", "inputs": [[2]], "outputs": [[0, 1]]}, "def f(n): return list(range(n))", True),
        (
            {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]},
            "class Solution:\n    def f(self, a, b): return a + b",
            True,
        ),
        ({"inputs": [""], "outputs": [""], "assert_case": ["assert f(1) == 2"]}, "def f(a): return a + 1", True),
        ({"inputs": [""], "outputs": [""], "assert_case": ["assert f(1) == 2"]}, "def f(a): return a", False),
        ({"inputs": [""], "outputs": [""], "assert_case": ["assert f(1) == 2"]}, "pass", False),
        ({"inputs": ["5\n"], "outputs": ["5\n"]}, "print(open('/dev/stdin').read())", True),
        ({"inputs": ["5\n6\n"], "outputs": ["6\n"]}, "open('/dev/stdin')\nimport sys\ninput()\nprint(input())", True),
    ],
)
def test_rows_of_verl_are_judged(truth, program, right):
    row = verl({"prompt": "q", "reward_model": {"ground_truth": truth}})

    async def judge():
        pool = VerifierPool(1, ItemLimits(10.0, 60.0))
        try:
            return await pool.verify("code", Item("", f"```python\n{program}\n```", row.answer, row.line()))
        finally:
            await pool.close()

    assert asyncio.run(judge()).correct is right


def test_share_of_tests_is_the_reward():
    (verdict,) = asyncio.run(verdicts(["return 4"], reward="share"))
    assert (verdict.reward, verdict.correct) == (0.5, False)


def test_dead_sandbox_is_judged_again():
    """The first judgement fails with the zygote; the second has a new one."""

    async def judge():
        pool = VerifierPool(1, ItemLimits(10.0, 60.0))
        try:
            assert (await pool.verify("code", item("return 2 * x"))).correct
            (sandbox,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "bwrap"][:1]
            sandbox.kill()
            psutil.wait_procs([sandbox], 2.0)
            verdict = await pool.verify("code", item("return 2 * x"))
            return verdict.correct, pool.undecided
        finally:
            await pool.close()

    assert asyncio.run(judge()) == (True, 0)


def test_limits_too_small_for_programs_are_refused():
    assert "too small" in check_settings({"memory_mb": 16}, Config())
    assert check_settings({"memory_mb": 64}, Config()) is None


FRACTION = "from fractions import Fraction\ndef half(a):\n    return Fraction(a, 2)\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("def half(a):\n    return a / 2\n", None),
        ("half of it", None),
        ("", None),
        ("def half(a):\n    return a\n", "fails the tests (wrong)"),
        (FRACTION, "fails the tests (wrong)"),
    ],
)
def test_reference_that_fails_is_refused(answer, problem):
    """A right result that the sandbox cannot bring to the tests, such as a Fraction, makes the row useless."""
    tests = {"function": "half", "source": "import fractions\nassert half(3) == fractions.Fraction(3, 2)\n"}

    async def check():
        pool = VerifierPool(1, ItemLimits(10.0, 60.0))
        try:
            return await pool.check_answer("code", Item("", "", answer, {KEY: tests}))
        finally:
            await pool.close()

    found = asyncio.run(check())
    assert found is None if problem is None else problem in found

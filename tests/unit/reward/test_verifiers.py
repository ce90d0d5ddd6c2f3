"""Built-in verifiers, what counts as a verdict, and the door ``data.verifier``."""

import math as numbers
import threading
from fractions import Fraction

import numpy as np
import pytest

from realsys.config.doors import VERIFIER
from realsys.config.machine import Machine
from realsys.config.rules import check
from realsys.errors import ConfigError
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

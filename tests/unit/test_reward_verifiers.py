"""What counts as right."""

import threading

import pytest

from realsys.reward.verifiers import exact, load_verifier, math


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
    assert exact("", answer, reference) is right


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
    assert math("", answer, reference) is right


def test_math_works_outside_the_main_thread_where_alarms_do_not():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(math("", r"\boxed{7}", "7")))
    thread.start()
    thread.join(60)
    assert verdicts == [True]


def test_a_reference_that_says_nothing_is_an_error_not_a_wrong_answer():
    with pytest.raises(ValueError, match="no mathematical expression"):
        math("", r"\boxed{7}", "")


def test_unknown_verifiers_are_named():
    with pytest.raises(ValueError, match="known: exact, math"):
        load_verifier("exactly")
    with pytest.raises(ValueError, match="no function 'nothing'"):
        load_verifier("tests.unit.reward_verifiers:nothing")
    assert load_verifier("tests.unit.reward_verifiers:behave")("", "a", "a") is True

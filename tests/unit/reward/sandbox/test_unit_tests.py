"""The source of unit tests: what is run, what is the program's, and what cannot judge."""

import ast

import pytest

from realsys.reward.sandbox.inside.unit_tests import defined, functions_of, modules_of, problem_of, start_of, taken


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("assert f(1) == 2", {"f"}),
        ("assert list(map(f, g(1))) == [x for x in h]", {"f", "g"}),
        ("candidate = f\nassert candidate(1)", {"f"}),
        ("for each in (f, g): each(1)", {"f", "g"}),
        ("assert f(1) == EXPECTED", {"f"}),
        ("assert math.isclose(f(1), np.one)", {"f"}),
        ("assert bisect([1], 2) == 1", {"bisect"}),
        ("def f(): pass\nassert sum([f()])", set()),
    ],
)
def test_names_in_use_are_the_programs(source, names):
    assert taken(ast.parse(source)) == names


def test_modules_come_from_the_library():
    assert modules_of(ast.parse("import os\nos.x, math.pi, bisect(1)")) == {"math"}


def test_only_unmentioned_functions_are_called():
    source = "def test_a(): pass\ndef test_b(): pass\ndef helper(): pass\ntest_b()\n"
    assert functions_of(ast.parse(source)) == ["test_a"]


@pytest.mark.parametrize(
    ("source", "function", "names"),
    [
        ("import os\ndef f(x):\n", "f", {"os", "f", "x"}),
        ("def g(): pass\ndef f():\n", "", {"g"}),
        ("class S:\n    def f(self):\n        ", "S.f", {"S", "f", "self"}),
        ("def f():\n    x = 1\n    ", "f", {"f", "x"}),
    ],
)
def test_start_of_a_program_is_read(source, function, names):
    assert defined(start_of(source, function)) == names


def test_text_is_no_start_of_a_program():
    assert start_of("def f( =", "f") is None


@pytest.mark.parametrize(
    "source",
    [
        "import re as r\nx = f()\nassert r.match('a', x)",
        "try:\n    f()\nexcept ValueError as e:\n    assert e.args",
        "match f():\n    case [a, *b]: assert a and b",
        "from math import *\nassert isclose(f(), pi)",
        "assert (lambda v: v)(f()) == g.__name__\ncheck = f, g",
    ],
)
def test_names_that_something_defines_are_taken(source):
    assert problem_of(source, "f", ["", "def g(): pass"]) is None


def test_helpers_of_the_prompt_are_defined():
    assert problem_of("assert K == f()", "f", ["K = 1"]) is None
    assert "line 1: 'K' is not defined" in problem_of("assert K == f()", "f", [])

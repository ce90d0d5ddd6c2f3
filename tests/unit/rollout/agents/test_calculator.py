"""The calculator: values of expressions, and bounded time for any text."""

import asyncio

import pytest

from realsys.rollout.agents.tool_use import Calculator, ToolError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+5*2", "13"),
        (" (3+5)*2 ", "16"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("-7//2", "-4"),
        ("2**10 % 7", "2"),
        ("1e3", "1000"),
    ],
)
def test_expression_has_its_value(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "1/0",
        "(-1)**0.5",
        "1e308*10",
        "a+1",
        "__import__('os')",
        "'a'*9999999",
        "[1]*9",
        "True+1",
        "2<<99999",
        "(" * 300 + "1" + ")" * 300,
        "-" * 900 + "1",
        "1" * 2000,
        "9" * 900 + "**9",
        "",
        "\0",
    ],
)
def test_anything_else_is_an_error_for_the_model(expression):
    with pytest.raises(ToolError, match="^error: "):
        calculate(expression)


def test_argument_must_be_a_text():
    with pytest.raises(ToolError, match="expression must be a text"):
        asyncio.run(Calculator().call({"expression": 3}, 1.0))

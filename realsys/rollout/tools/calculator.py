"""The tool ``calculator``: arithmetic of numbers, without running code. Its time and its numbers are bounded."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from realsys.rollout.tools.base import ToolError, describe, text_argument

MAX_CHARACTERS = 1000
MAX_BITS = 4096  # longest integer
MAX_DEPTH = 100

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """Tool with + - * / // % ** and parentheses."""

    description = describe("calculator", "Computes an arithmetic expression.", expression="such as (3+5)*2")

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the value of ``expression``."""
        return calculate(text_argument(arguments, "expression"))

    def close(self) -> None:
        """There is nothing to end."""


def calculate(expression: str) -> str:
    """Return the value of an expression. Raises ToolError."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"error: more than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, 0)
    except ZeroDivisionError:
        raise ToolError("error: division by zero") from None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        raise ToolError("error: not an arithmetic expression") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("error: the number is too large")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError("error: too many parentheses")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ToolError("error: the root of a negative number")
        return _bounded(result)
    raise ToolError("error: not an arithmetic expression")


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("error: the number is too large")
    number: Number = value
    return number


def _check_power(base: Number, exponent: Number) -> None:
    """Raise ToolError before a power is computed that would take long."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ToolError("error: the number is too large")

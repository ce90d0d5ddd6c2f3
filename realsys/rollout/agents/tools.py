"""Tools that the model calls in the agent ``tool_use``: contract, choice, calculator, Python.

Names of tools: ``realsys.config.doors``.
"""

from __future__ import annotations

import ast
import asyncio
import math
import operator
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from realsys.config.doors import TOOL
from realsys.errors import ConfigError
from realsys.reward.sandbox.sandbox import Sandbox
from realsys.reward.sandbox.settings import INSTALL, Output, RunLimits


class ToolError(Exception):
    """The call is wrong. Its message is the result that the model reads."""


class Tool(Protocol):
    """A tool. One object per RolloutWorker serves many episodes. A class without constructor arguments.

    A tool with places for few calls may have ``async ready()``, which waits until one is free. ``call`` follows without
    a pause in between. The wait takes no time from the episode.
    """

    description: dict[str, Any]  # form of OpenAI's API: type, function (name, description, parameters)

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the result as the model reads it. ``arguments`` are the model's: any JSON object.

        Raises ToolError; any other exception fails the episode. The call is cancelled after ``timeout_s``.
        """
        ...

    def close(self) -> None:
        """End the processes and threads of the tool."""
        ...


def describe(name: str, text: str, **parameters: str) -> dict[str, Any]:
    """Return the description of a tool whose ``parameters`` (name -> meaning) are all required texts."""
    properties = {name: {"type": "string", "description": meaning} for name, meaning in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


def text_argument(arguments: dict[str, Any], name: str) -> str:
    """Return a text argument. Raises ToolError if the model did not give it."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"error: the argument {name} must be a text")
    return value


# ---- choice of tools


def build(names: Sequence[str]) -> dict[str, Tool]:
    """Build the tools that ``rollout.agent_args.tools`` names; the model calls them by the names of their descriptions.

    Raises ConfigError, also for a tool that cannot work on this machine.
    """
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            TOOL.field, names, f"must be a list of tools: {', '.join(TOOL.builtin)}, or package.module:Class"
        )
    tools: dict[str, Tool] = {}
    for name in names:
        loaded = TOOL.load(name)
        with TOOL.guard(name, "cannot be built"):
            tool: Tool = loaded()
        if tool.description["function"]["name"] in tools:
            raise ConfigError(TOOL.field, names, f"{name} has the name of another tool: name each tool once")
        tools[tool.description["function"]["name"]] = tool
    return tools


# ---- calculator: arithmetic of numbers, without running code. Its time and its numbers are bounded


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


# ---- python: runs a program in the sandbox and returns its output


MEMORY_MB = 512.0
_SHORTEST_S = 0.1


class Python:
    """Tool that runs Python programs. They see no file of the trial, no network, and nothing of each other."""

    description = describe(
        "python", "Runs a Python program and returns what it prints.", code="the whole program, with print"
    )

    def __init__(self) -> None:
        """Raise ConfigError if this machine cannot isolate programs."""
        if shutil.which("bwrap") is None:
            problem = f"python needs a sandbox, and bwrap is not found: {INSTALL}, or leave python out"
            raise ConfigError("rollout.agent_args.tools", "python", problem)
        self._places = max(2, os.cpu_count() or 2)  # programs that run at a time
        self._running = 0
        self._ended = asyncio.Event()
        self._threads = ThreadPoolExecutor(self._places, "python-tool")
        self._own = threading.local()  # a sandbox belongs to one thread
        self._sandboxes: list[Sandbox] = []

    async def ready(self) -> None:
        """Wait for a free thread. Programs of other episodes hold each one for their bounded time."""
        while self._running >= self._places:
            self._ended.clear()
            await self._ended.wait()

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what the program ``code`` prints, and the last line of its error."""
        code, loop = text_argument(arguments, "code"), asyncio.get_running_loop()
        program = loop.run_in_executor(self._threads, self._run, code, timeout_s)
        self._running += 1
        program.add_done_callback(self._end)
        return await asyncio.shield(program)  # a call that is cancelled leaves its thread busy

    def close(self) -> None:
        """End the sandboxes, and with them all programs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _end(self, _: asyncio.Future[str]) -> None:
        self._running -= 1
        self._ended.set()

    def _run(self, code: str, timeout_s: float) -> str:
        if not hasattr(self._own, "sandbox"):
            self._own.sandbox = Sandbox()
            self._sandboxes.append(self._own.sandbox)
        seconds = max(_SHORTEST_S, timeout_s)
        limits = RunLimits(cpu_s=seconds, wall_s=seconds, memory_mb=MEMORY_MB)
        output: Output = self._own.sandbox.run(code, b"", limits)
        printed = output.stdout.decode("utf-8", "replace")
        if not output.ended.reason:
            return printed
        lines = output.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if output.ended.reason == "crashed" and lines else f"limit reached: {output.ended.reason}"
        raise ToolError(f"{printed}error: {reason}")

"""Finds the program in a completion: the last fenced block behind the thinking part, or a continuation of the stub."""

from __future__ import annotations

import ast
import re

from realsys.data.layouts.code_tests import CodeTests
from realsys.reward.mathematics.final_answers import after_thinking

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*$", re.M)
PYTHON = "python"


def program_in(completion: str, tests: CodeTests) -> str | None:
    """Return the whole program of a completion; None if it has none, or its thinking part has not ended."""
    text = after_thinking(completion)
    if text is None:
        return None
    block = last_block(text)
    if tests.language != PYTHON:
        return None if block is None else tests.preamble + block
    if block is None:
        if not tests.stub and not _parses(text):
            return None  # prose
        block = text
    return whole_program(block, tests)


def last_block(text: str) -> str | None:
    """Return the content of the last fenced block; None without one. A block that is not closed ends with the text."""
    blocks = []
    at = 0
    while (opening := _FENCE.search(text, at)) is not None:
        begin = opening.end() + 1
        mark = re.escape(opening[1])
        closing = re.compile(rf"^[ \t]*{mark}[`~]*[ \t]*$", re.M).search(text, begin)
        blocks.append(text[begin : closing.start() if closing else len(text)])
        if closing is None:
            break
        at = closing.end()
    return blocks[-1] if blocks else None


def reference_in(answer: str, tests: CodeTests) -> str | None:
    """Return the whole program of a reference solution; None if the answer of a row is no Python program."""
    source = whole_program(answer, tests)
    if tests.language != PYTHON or not answer.strip() or not _parses(source):
        return None
    if name := tests.function.partition(".")[0]:
        return source if _defines(source, name) else None
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Call)
    return source if any(isinstance(each, kinds) for each in ast.walk(ast.parse(source))) else None


def callable_in(source: str, function: str) -> str:
    """Return the name to call: that of a method if the program has the function in a ``class Solution`` only."""
    if "class Solution" in source and not _defines(source, function.partition(".")[0]):
        return f"Solution.{function}"
    return function


def whole_program(block: str, tests: CodeTests) -> str:
    """Put what the prompt gives before the block, unless the block has it."""
    if tests.stub and not _defines(block, tests.function.partition(".")[0]):
        joint = "" if tests.stub.endswith("\n") else "\n"
        continued = tests.stub + joint + block
        if _parses(continued):
            return continued
    return f"{tests.preamble}\n{block}" if tests.preamble else block


def _defines(block: str, name: str) -> bool:
    """Return True if the block is source that defines the name."""
    if not _parses(block):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = ast.parse(block).body
    defined = {each.name for each in body if isinstance(each, kinds)}
    defined |= {t.id for each in body if isinstance(each, ast.Assign) for t in each.targets if isinstance(t, ast.Name)}
    return name in defined if name else bool(defined)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True

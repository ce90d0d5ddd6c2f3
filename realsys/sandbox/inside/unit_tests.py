"""Reads the source of unit tests: tests that are run, names of the program, and reasons why it cannot judge.

statements        are executed, with ``__name__ == "__main__"``
def test...       is called afterwards, unless the source mentions it elsewhere
unittest.TestCase is run afterwards, unless ``unittest.main()`` has ended the source
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def start_of(source: str, function: str) -> ast.Module | None:
    """Read the start of a program, which may end in the middle of a function; None if it is no Python.

    Leaves out a last function that the completion ends, unless ``function`` names what the completion defines.
    """
    last = next((line for line in reversed(source.splitlines()) if line.strip()), "")
    indent = last[: len(last) - len(last.lstrip())]
    for text in (source, f"{source}\n{indent}    pass", f"{source}\n{indent}pass"):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        if not function and tree.body and isinstance(tree.body[-1], _DEFINITIONS):
            tree.body.pop()
        return tree
    return None


def functions_of(tree: ast.Module) -> list[str]:
    """Return the test functions that the source defines and does not mention elsewhere."""
    mentioned = _names(tree, ast.Load)
    return [each.name for each in _tests(tree) if isinstance(each, _FUNCTIONS) and each.name not in mentioned]


def taken(tree: ast.Module) -> set[str]:
    """Return the names that the tests take from the program: they call them, pass them on, or assign them."""
    used, called = {each.id for each in _used(tree)}, _called(tree)
    return {name for name in used - defined(tree) if name in called or not _is_known(name)} - set(dir(builtins))


def modules_of(tree: ast.Module) -> set[str]:
    """Return the modules of the standard library that the tests use and do not import."""
    return (_names(tree, ast.Load) - defined(tree) - _called(tree)) & sys.stdlib_module_names


def problem_of(source: str, function: str, starts: Iterable[str]) -> str | None:
    """Return why the tests cannot judge a program; None if they can, as far as their source tells."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return f"code_tests.source is no Python: {error}"
    names = {function.partition(".")[0]}
    for start in starts:
        read = start_of(start, function)
        if read is None:
            return f"the start of a program is no Python, so the tests cannot have its helpers: {start[-60:]!r}"
        names |= defined(read)
    if problem := _not_run(tree) or _undefined(tree, names):
        line, text = problem
        return f"code_tests.source, line {line}: {text}"
    return None


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a source binds anywhere."""
    return set(_bound(tree))


def _bound(tree: ast.Module) -> Iterator[str]:
    yield from _names(tree, ast.Store)
    for each in ast.walk(tree):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=new):
                yield new or name.partition(".")[0]
            case ast.arg(arg=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def _names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def _called(tree: ast.Module) -> set[str]:
    """Return the names that are called. No module can be called."""
    calls = (each.func for each in ast.walk(tree) if isinstance(each, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


def _used(tree: ast.Module) -> Iterator[ast.Name]:
    """Yield the names that are called, passed on or assigned. Never one that a result is compared with."""
    for each in ast.walk(tree):
        match each:
            case ast.Call(func=func, args=arguments, keywords=named):
                values = [func, *arguments, *(pair.value for pair in named)]
            case ast.List(elts=values) | ast.Tuple(elts=values):
                pass
            case ast.Dict(values=values):
                pass
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                values = [value]
            case _:
                continue
        yield from (v for v in values if isinstance(v, ast.Name) and isinstance(v.ctx, ast.Load))


def _is_known(name: str) -> bool:
    return hasattr(builtins, name) or name in sys.stdlib_module_names or name.startswith("__")


def _tests(tree: ast.Module) -> Iterator[ast.stmt]:
    for each in tree.body:
        if isinstance(each, _DEFINITIONS) and each.name.lower().startswith("test"):
            yield each


def _not_run(tree: ast.Module) -> tuple[int, str] | None:
    mentioned = _names(tree, ast.Load)
    for each in _tests(tree):
        if each.name in mentioned:  # type: ignore[attr-defined]
            continue
        if isinstance(each, ast.AsyncFunctionDef) or (isinstance(each, ast.FunctionDef) and _needs(each.args)):
            return each.lineno, f"{each.name} is async or takes arguments, and nothing calls it"
        if isinstance(each, ast.ClassDef) and not each.bases:
            return each.lineno, f"class {each.name} must derive from unittest.TestCase to be run"
    runs = any(bool(each.bases) if isinstance(each, ast.ClassDef) else _calls(each) for each in tree.body)
    if not runs and not functions_of(tree):
        return tree.body[0].lineno if tree.body else 1, "nothing calls the program: any program would pass"
    return None


def _needs(arguments: ast.arguments) -> bool:
    return len(arguments.posonlyargs) + len(arguments.args) > len(arguments.defaults) or None in arguments.kw_defaults


def _calls(statement: ast.stmt) -> bool:
    return not isinstance(statement, _DEFINITIONS) and any(isinstance(e, ast.Call) for e in ast.walk(statement))


def _undefined(tree: ast.Module, names: set[str]) -> tuple[int, str] | None:
    names = names | defined(tree) | taken(tree)
    if "*" in names:
        return None
    loaded = (each for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    for each in loaded:
        if each.id not in names and not _is_known(each.id):
            remedy = "import or define it, or name it in code_tests.function"
            return each.lineno, f"{each.id!r} is not defined: {remedy}"
    return None

"""The process of unit tests: runs their source, which calls the program in its own process.

tests ──plain arguments──> program
tests <──plain result, or names of the exception's classes── program
tests ──verdict──> outside, on a descriptor that the program's process never had
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import plain


class ProgramError(Exception):
    """The program raised something that is no Exception, such as SystemExit."""


class ProgramGone(BaseException):
    """The process of the program has ended, or sent something that cannot be read."""


class Link:
    """Calls of the program.

    gone    it ended while it was needed; then no test can pass
    called  something of it was called; tests that call nothing tell nothing
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.gone = False
        self.called = False

    def receive(self) -> Any:
        """Return what the program sent. Raises what the program raised, or ProgramGone."""
        try:
            data = plain.receive(self._descriptor)
            answer = None if data is None else plain.decode(data)
        except (OSError, plain.PlainError):
            answer = None
        match answer:
            case ("ok", result):
                return plain.replaced(result, plain.Handle, lambda handle: Remote(self, handle))
            case ("raised", list() as names, str() as text):
                raise _exception(names, text)
        self.gone = True
        raise ProgramGone("the program ended")

    def ask(
        self, operation: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Have the program do something, and return the result."""
        self.called = self.called or operation == "call"
        try:
            data = plain.encode((operation, target, _bare(arguments), _bare(named or {})))
        except plain.PlainError as error:
            raise TypeError(f"an argument of the program is {error}") from None
        try:
            plain.send(self._descriptor, data)
        except OSError:
            self.gone = True
            raise ProgramGone("the program ended") from None
        return self.receive()


class Stopped(RuntimeError):
    """The program raised StopIteration. As such it would end a loop of the tests early, as if all had passed."""


class Remote:
    """A value in the process of the program: it can be called, iterated, indexed, passed back, and has attributes."""

    def __init__(self, link: Link, target: Any) -> None:
        object.__setattr__(self, "_link_", link)
        object.__setattr__(self, "_target_", target)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link_.ask("call", self._target_, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link_.ask("attribute", self._target_, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._special_("__setattr__", name, value)

    def __iter__(self) -> Any:
        return self._special_("__iter__")

    def __next__(self) -> Any:
        try:
            return self._special_("__next__")
        except Stopped:
            raise StopIteration from None

    def __len__(self) -> Any:
        return self._special_("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._special_("__getitem__", key)

    def __bool__(self) -> bool:
        """Return what the program's ``bool`` would: an object without ``__bool__`` and ``__len__`` is true."""
        for name in ("__bool__", "__len__"):
            with contextlib.suppress(TypeError):
                return bool(self._special_(name))
        return True

    def _special_(self, name: str, *arguments: Any) -> Any:
        try:
            method = self._link_.ask("attribute", self._target_, (name,))
        except AttributeError:
            raise TypeError(f"the program's object has no {name}") from None
        return method(*arguments)


def run(task: dict[str, Any], channel: int, descriptor: int) -> None:
    """Run the tests, send the verdict, and end the process."""
    link = Link(descriptor)
    why = ""
    try:
        link.receive()  # the program has been loaded
        test(task, link)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:300]
    passed = not why and not link.gone
    plain.send(channel, plain.encode({"passed": passed, "called": link.called, "gone": link.gone, "why": why}))
    os._exit(0)


def test(task: dict[str, Any], link: Link) -> None:
    """Run the tests of a task. Raises their exceptions."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["tests"]
    namespace = module.__dict__
    tree = _filled(task, link, namespace)
    ended = False
    try:
        exec(compile(tree, "tests", "exec", dont_inherit=True), namespace)
    except SystemExit as error:  # unittest.main(); the program cannot raise it here
        if error.code:
            raise
        ended = True
    for name in functions_of(tree):
        namespace[name]()
    if not ended:
        _run_cases(namespace)


def _filled(task: dict[str, Any], link: Link, namespace: dict[str, Any]) -> ast.Module:
    """Put into the namespace what the tests use and do not define. Returns their source."""
    namespace["__name__"] = "tests"  # so that the main part of a prompt does not run
    for trusted in task["trusted"]:
        if start := start_of(trusted, task["function"]):
            exec(compile(start, "prompt", "exec", dont_inherit=True), namespace)
    if function := task["function"]:
        first = function.partition(".")[0]
        namespace[first] = link.ask("get", first)
    tree: ast.Module = ast.parse(task["source"], "tests")
    for name in sorted(modules_of(tree) - namespace.keys()):
        namespace[name] = importlib.import_module(name)
    for name in sorted(taken(tree) - namespace.keys()):
        with contextlib.suppress(NameError):  # then the tests raise it
            value = link.ask("get", name)
            if isinstance(value, Remote):  # a number of the program is nothing to compare results with
                namespace[name] = value
    namespace["__name__"] = "__main__"
    return tree


def _run_cases(namespace: dict[str, Any]) -> None:
    """Run the test cases that the source defines. Raises AssertionError for the first that fails."""
    unittest = sys.modules.get("unittest")
    if unittest is None:
        return
    for each in dict.fromkeys(value for value in namespace.values() if isinstance(value, type)):
        if issubclass(each, unittest.TestCase) and each.__module__ == "__main__":
            result = unittest.defaultTestLoader.loadTestsFromTestCase(each).run(unittest.TestResult())
            if not result.wasSuccessful():
                failed = [text for _, text in (*result.failures, *result.errors)]
                raise AssertionError(failed[0][-200:] if failed else "a test was expected to fail")


def _exception(names: list[Any], text: str) -> Exception:
    """Make the built-in exception that the program's is derived from most closely."""
    for name in names:
        if name in ("StopIteration", "StopAsyncIteration"):
            return Stopped(text)
        found = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(text)
            except TypeError:  # UnicodeDecodeError takes five arguments
                return ValueError(text)
    return ProgramError(f"{names[0] if names else ''}: {text}")


def _bare(value: Any) -> Any:
    """Return arguments with the handles of the program's values."""

    def target(remote: Remote) -> Any:
        return remote._target_ if isinstance(remote._target_, plain.Handle) else remote

    return plain.replaced(value, Remote, target)


# ---- reading the source of unit tests: tests that are run, names of the program, reasons why it cannot judge
#
# statements        are executed, with ``__name__ == "__main__"``
# def test...       is called afterwards, unless the source mentions it elsewhere
# unittest.TestCase is run afterwards, unless ``unittest.main()`` has ended the source


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

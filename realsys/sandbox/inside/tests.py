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
from typing import Any

from . import plain, unit_tests


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
                return _wrapped(result, self)
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
    for name in unit_tests.functions_of(tree):
        namespace[name]()
    if not ended:
        _run_cases(namespace)


def _filled(task: dict[str, Any], link: Link, namespace: dict[str, Any]) -> ast.Module:
    """Put into the namespace what the tests use and do not define. Returns their source."""
    namespace["__name__"] = "tests"  # so that the main part of a prompt does not run
    for trusted in task["trusted"]:
        if start := unit_tests.start_of(trusted, task["function"]):
            exec(compile(start, "prompt", "exec", dont_inherit=True), namespace)
    if function := task["function"]:
        first = function.partition(".")[0]
        namespace[first] = link.ask("get", first)
    tree: ast.Module = ast.parse(task["source"], "tests")
    for name in sorted(unit_tests.modules_of(tree) - namespace.keys()):
        namespace[name] = importlib.import_module(name)
    for name in sorted(unit_tests.taken(tree) - namespace.keys()):
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


def _wrapped(value: Any, link: Link) -> Any:
    if isinstance(value, plain.Handle):
        return Remote(link, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(each, link) for each in value)
    if isinstance(value, dict):
        return {key: _wrapped(each, link) for key, each in value.items()}
    return value


def _bare(value: Any) -> Any:
    if isinstance(value, Remote):
        return value._target_ if isinstance(value._target_, plain.Handle) else value
    if type(value) in (list, tuple):
        return type(value)(_bare(each) for each in value)
    if type(value) is dict:
        return {key: _bare(each) for key, each in value.items()}
    return value

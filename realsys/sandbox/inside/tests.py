"""The process of unit tests: runs their source, which calls the program in its own process.

tests ──plain arguments──> program
tests <──plain result, or names of the exception's classes── program
tests ──verdict──> outside, on a descriptor that the program's process never had
"""

from __future__ import annotations

import ast
import builtins
import os
from typing import Any

from . import plain


class ProgramError(Exception):
    """The program raised something that is no Exception, such as SystemExit."""


class ProgramGone(BaseException):
    """The process of the program has ended, or sent something that cannot be read."""


class Link:
    """Calls of the program. ``gone``: it ended while it was needed; then no test can pass."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.gone = False

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


class Remote:
    """A value in the process of the program: it can be called, passed back, and its attributes can be read."""

    def __init__(self, link: Link, target: Any) -> None:
        self._link_ = link
        self._target_ = target

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link_.ask("call", self._target_, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link_.ask("attribute", self._target_, (name,))


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
    plain.send(channel, plain.encode({"passed": passed, "gone": link.gone, "why": why}))
    os._exit(0)


def test(task: dict[str, Any], link: Link) -> None:
    namespace: dict[str, Any] = {"__name__": "tests"}
    for trusted in task["trusted"]:
        try:
            code = compile(trusted, "prompt", "exec", dont_inherit=True)
        except SyntaxError:
            continue  # the start of a function that the completion ends
        exec(code, namespace)
    if function := task["function"]:
        first = function.partition(".")[0]
        namespace[first] = link.ask("get", first)
    tree = ast.parse(task["source"], "tests")
    wanted = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    for name in sorted(wanted):
        if name not in namespace and not hasattr(builtins, name):
            try:
                namespace[name] = link.ask("get", name)
            except NameError:
                continue  # a name of the tests themselves
    exec(compile(tree, "tests", "exec", dont_inherit=True), namespace)


def _exception(names: list[Any], text: str) -> Exception:
    """Make the built-in exception that the program's is derived from most closely."""
    for name in names:
        if name in ("StopIteration", "StopAsyncIteration"):
            return RuntimeError(text)  # it would end a loop of the tests early, as if all had passed
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

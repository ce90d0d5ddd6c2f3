"""The process of a program: runs it with input and output, answers calls, or executes a command.

Nothing here is trusted: the program controls this process and its descriptors. It can only send plain data, as if its
functions had returned it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import types
from io import TextIOWrapper
from typing import Any, Literal

from . import plain

_STDIN = "/dev/stdin"


def run(task: dict[str, Any], descriptors: list[int]) -> None:
    """Run the source with stdin, stdout and stderr; ends the process as Python would."""
    if _STDIN in task["source"]:
        _make_stdin(descriptors[0])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_standard()
    code = 0
    try:
        load_source(task["source"], "__main__")
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    os._exit(code)


def command(task: dict[str, Any], channel: int, descriptors: list[int]) -> None:
    """Write the files and execute the command; then copy the file that it made, if one is wanted.

    ``descriptors``: stdin, stdout, stderr, the copy, and the content of each file.
    """
    standard, copy, contents = descriptors[:3], descriptors[3], descriptors[4:]
    for name, content in zip(task["files"], contents, strict=True):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            _copy(content, file.fileno())
        os.chmod(name, 0o700)
        with open(name, "rb") as file:
            if _STDIN.encode() in file.read():
                _make_stdin(standard[0])
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            os.execve(task["argv"][0], task["argv"], task["environment"])
        os._exit(127)
    for descriptor in standard:
        os.close(descriptor)
    while True:
        ended, status = os.wait()
        if ended == pid:
            break
    code = os.waitstatus_to_exitcode(status)
    made = False
    if task["makes"] and code == 0:
        with contextlib.suppress(OSError), open(task["makes"], "rb") as file:
            _copy(file.fileno(), copy)
            made = True
    plain.send(channel, plain.encode({"code": code, "made": made}))
    os._exit(int(code != 0))  # the zygote looks why a program fails


def _make_stdin(descriptor: int) -> None:
    """Make the file to which /dev/stdin leads, unless it leads to something: programs see no /proc. Then the program
    reads from there, so that both names have one position.
    """
    if os.path.islink(_STDIN) and not os.path.exists(_STDIN):
        with open(os.readlink(_STDIN), "wb") as file:
            _copy(descriptor, file.fileno())
        os.dup2(os.open(_STDIN, os.O_RDONLY), descriptor)


def _copy(source: int, target: int) -> None:
    while os.sendfile(target, source, None, 1 << 20):
        pass


def serve(task: dict[str, Any], link: int) -> None:
    """Load the source, then answer requests until the other side closes the link."""
    _open_standard()
    objects: list[Any] = []
    try:
        namespace = load_source(task["source"], "program")  # so that its main part does not run
    except BaseException as error:
        plain.send(link, _raised(error))
        os._exit(1)
    plain.send(link, plain.encode(("ok", None)))
    while (data := plain.receive(link)) is not None:
        try:
            answer = plain.encode(("ok", answer_request(namespace, objects, plain.decode(data))), _keeper(objects))
        except BaseException as error:
            answer = _raised(error)
        plain.send(link, answer)
    os._exit(0)


def _keeper(objects: list[Any]) -> plain.Keep:
    def keep(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    return keep


def answer_request(namespace: dict[str, Any], objects: list[Any], request: Any) -> Any:
    operation, target, arguments, named = request
    found = objects[target.number] if isinstance(target, plain.Handle) else _named(namespace, target)
    if operation == "get":
        return found
    if operation == "attribute":
        return getattr(found, arguments[0])
    own = plain.replaced((arguments, named), plain.Handle, lambda handle: objects[handle.number])
    return found(*own[0], **own[1])


def _named(namespace: dict[str, Any], name: str) -> Any:
    """Return a value of the program. ``Class.method``: of a new object."""
    first, *others = name.split(".")
    if first not in namespace:
        raise NameError(f"name {first!r} is not defined")
    found = namespace[first]
    if others and isinstance(found, type):
        found = found()
    for other in others:
        found = getattr(found, other)
    return found


def _raised(error: BaseException) -> bytes:
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    names = [each.__name__ for each in type(error).__mro__]
    return plain.encode(("raised", names, text))


def load_source(source: str, name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv = ["program"]
    exec(compile(source, "program", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _open_standard() -> None:
    sys.stdin = open_text(0, "r")
    sys.stdout = open_text(1, "w")
    sys.stderr = open_text(2, "w")
    sys.stderr.reconfigure(line_buffering=True)


def open_text(descriptor: int, mode: Literal["r", "w"]) -> TextIOWrapper:
    return open(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1

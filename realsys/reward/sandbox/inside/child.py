"""A child of the zygote: confines itself, says that it is ready, and then runs what the outside sends.

The zygote rehearses what each child does, with programs of this module only. A child shares the memory of the zygote
until it writes to it; then the kernel copies that page. The interpreter writes to memory when it runs code for the
first times: it specializes instructions, and fills caches. After the rehearsal most of that is done, and a child copies
fewer pages.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import Any

from . import confine, kernel, plain, program, unit_tests

BROKEN = 99  # exit code of a child that could not begin; it has not said that it is ready
READY = b"ready"
_NICE = 10  # so that the zygote, which watches over the limits, runs first
_REHEARSALS = 20  # the interpreter specializes instructions that ran 8 times
_PROGRAM = "def double(n):\n    return 2 * n\n\n\nif __name__ == '__main__':\n    print(double(int(input())))\n"
_TESTS = "def check(f):\n    assert f([1]) == [1]\n\n\ncheck(double)\n"


def main(message: dict[str, Any], descriptors: list[int], setup: dict[str, Any], user: tuple[int, int]) -> None:
    """Run the child; it ends the process."""
    mode, limits = message["mode"], message["limits"]
    gc.disable()
    channel, *rest = _low(descriptors)
    try:
        _confine(limits, setup, user)
    except OSError as error:
        plain.send(channel, f"broken: {error}".encode())
        os._exit(BROKEN)
    plain.send(channel, READY)
    data = plain.receive(channel)
    if data is None:
        os._exit(BROKEN)
    task = plain.decode(data)
    del data
    gc.enable()
    if mode == "test":
        unit_tests.run(task, channel, rest[0])
    elif mode == "command":
        program.command(task, channel, rest)
    elif mode == "serve":
        os.close(channel)
        program.serve(task, rest[0])
    else:
        os.close(channel)
        program.run(task, rest)


def _low(descriptors: list[int]) -> list[int]:
    """Move the descriptors to 3, 4, ..., make 0, 1 and 2 null, and close all others."""
    high = [os.dup2(each, 200 + place) for place, each in enumerate(descriptors)]
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    low = [os.dup2(each, 3 + place, inheritable=False) for place, each in enumerate(high)]
    os.closerange(3 + len(low), 1 << 16)
    return low


def _confine(limits: dict[str, Any], setup: dict[str, Any], user: tuple[int, int]) -> None:
    os.setpgid(0, 0)
    if not setup["namespaces"]:
        kernel.die_with_parent()
    else:
        confine.enter_namespaces(*user)
        confine.own_folders(int(limits["disk_mb"]))
    os.chdir(confine.TMP)
    os.umask(0o077)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    confine.limit(limits, namespaces=setup["namespaces"])
    if setup["namespaces"]:
        confine.give_up(setup["readable"])


class _Link(unit_tests.Link):
    """A link to no program: functions return their argument."""

    def ask(
        self, operation: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        return lambda value: value


def prepare(setup: dict[str, Any]) -> None:
    """Have the zygote do what children do, leave everything as it was, and make its modules final."""
    before = sys.argv, sys.modules["__main__"]
    for _ in range(_REHEARSALS):
        if setup["namespaces"]:
            confine.rehearse(setup["readable"])
        task = plain.decode(plain.encode({"source": _PROGRAM, "function": "double", "trusted": [], "files": (b"",)}))
        namespace = program.load_source(task["source"], "program")
        request = plain.decode(plain.encode(("call", "double", [1], {})))
        plain.decode(plain.encode(("ok", program.answer_request(namespace, [], request)), lambda value: 0))
        unit_tests.test({**task, "source": _TESTS}, _Link(-1))
        null = os.open("/dev/null", os.O_RDWR)
        for mode in ("r", "w"):
            with program.open_text(null, mode) as file:
                file.read() if mode == "r" else file.write("1\n")
        os.close(null)
    sys.argv, sys.modules["__main__"] = before
    del sys.modules["program"]
    sys.path[:] = [path for path in sys.path if path != "/realsys"]
    gc.collect()
    gc.freeze()  # a child that collects garbage does not touch, and so not copy, the memory of the modules

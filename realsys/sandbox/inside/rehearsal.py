"""Rehearses in the zygote what each child does.

A child shares the memory of the zygote until it writes to it; then the kernel copies that page. The interpreter writes
to memory when it runs code for the first times: it specializes instructions, and fills caches. After the rehearsal
most of that is done, and a child copies fewer pages. Only the text of this module is run here.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from . import confine, plain, preload, program, tests

_TIMES = 20  # the interpreter specializes instructions that ran 8 times
_PROGRAM = "def double(n):\n    return 2 * n\n\n\nif __name__ == '__main__':\n    print(double(int(input())))\n"
_TESTS = "def check(f):\n    assert f([1]) == [1]\n\n\ncheck(double)\n"


class _Link(tests.Link):
    """A link to no program: functions return their argument."""

    def ask(
        self, operation: str, target: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        return lambda value: value


def rehearse(setup: dict[str, Any]) -> None:
    """Do what children do, and leave everything as it was."""
    before = sys.argv, sys.modules["__main__"]
    for _ in range(_TIMES):
        if setup["namespaces"]:
            confine.rehearse(setup["readable"])
        task = plain.decode(plain.encode({"source": _PROGRAM, "function": "double", "trusted": [], "files": (b"",)}))
        preload.reseed()
        namespace = program.load_source(task["source"], "program")
        request = plain.decode(plain.encode(("call", "double", [1], {})))
        plain.decode(plain.encode(("ok", program.answer_request(namespace, [], request)), lambda value: 0))
        tests.test({**task, "source": _TESTS}, _Link(-1))
        null = os.open("/dev/null", os.O_RDWR)
        for mode in ("r", "w"):
            with program.open_text(null, mode) as file:
                file.read() if mode == "r" else file.write("1\n")
        os.close(null)
    sys.argv, sys.modules["__main__"] = before
    del sys.modules["program"]

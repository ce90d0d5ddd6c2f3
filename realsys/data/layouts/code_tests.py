"""The tests of a program, as every code layout writes them and a code verifier reads them.

A row of a code task has the key ``code_tests``, which reaches the verifier in ``Item.extra``:

    tests = code_tests_of(item.extra)

A program passes if it passes all tests of all kinds:

    stdio   the program is run once per test: ``stdin`` is its input, and its output must be ``stdout``
    calls   ``function(*args)`` of the program must return ``result``
    source  Python source of unit tests. It runs in another process than the program, which it can call; arguments and
            results are plain data (docs/sandbox.md). The program fails if the source raises
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realsys.errors import MALFORMED, DataError

KEY = "code_tests"


class StdioTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the program. How spaces and line ends are compared is the verifier's choice."""

    stdin: str
    stdout: str


class CallTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of ``CodeTests.function``. ``args`` and ``result`` are JSON values.

    wrapped  the only entry of the list ``result`` is right, too
    """

    args: list[Any]
    result: Any
    wrapped: bool = False


class CodeTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tests of one task; at least one of ``stdio``, ``calls`` and ``source`` is not empty.

    language         of the program
    function         name that ``calls`` call; ``Class.method`` is called on a new object without arguments
    preamble         source that runs before the program: imports and helpers that the prompt gives
    stub             start of the program that the prompt shows; a completion may continue it
    time_limit_s     time limit of one run or call, None if the data set gives none
    memory_limit_mb  in MiB, None if the data set gives none
    """

    language: str = "python"
    stdio: list[StdioTest] = []
    function: str = ""
    calls: list[CallTest] = []
    source: str = ""
    preamble: str = ""
    stub: str = ""
    time_limit_s: float | None = None
    memory_limit_mb: float | None = None

    def problem(self) -> str | None:
        """Return the problem that the types cannot express, or None."""
        if not (self.stdio or self.calls or self.source.strip()):
            return f"{KEY} has no tests: any program would pass"
        if self.calls and not self.function:
            return f"{KEY}.function is empty, but {KEY}.calls call it"
        for name, limit in (("time_limit_s", self.time_limit_s), ("memory_limit_mb", self.memory_limit_mb)):
            if limit is not None and limit <= 0:
                return f"{KEY}.{name} is {limit:g}: it must be greater than 0"
        return None


def code_tests_of(extra: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a row. Raises DataError if it has none, or wrong ones: that is no verdict on a program."""
    if KEY not in extra:
        raise DataError(f"the row has no key {KEY!r}: it is not a code task (docs/data.md)")
    try:
        tests = msgspec.convert(extra[KEY], CodeTests)
    except MALFORMED as error:
        raise DataError(f"{KEY}: {error}") from None
    if problem := tests.problem():
        raise DataError(problem)
    return tests

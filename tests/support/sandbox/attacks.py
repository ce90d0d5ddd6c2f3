"""Attacks on the sandbox: one Python program per file in tests/contracts/reward/sandbox/attacks, read as data.

The first line of a file's docstring says what the program does; lines ``key: value`` behind it are settings:

    tests      kinds of tests that judge it: stdio, calls, source; mapped: source that calls through ``map``
    task       what the program should do, by its name in TASKS; ``double`` if not given
    runs       2: the program looks for what its own first run has left behind
    right      yes: the program is right, and does harm besides; its verdict does not count
    unguarded  gains: it gets a passing verdict from a checker without isolation (``unguarded.py``)

A file with ``gained(outside)`` solves its task if that returns True, so a passing verdict shows that it got through.
"""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realsys.data.lines import KEY, CallTest, CodeTests, StdioTest
from realsys.reward.verifiers.contract import Item

FOLDER = Path(__file__).parents[2] / "contracts" / "reward" / "sandbox" / "attacks"
TIME_LIMIT_S = 0.5  # CPU time of one run
MEMORY_LIMIT_MB = 256.0
SETTINGS = {"tests", "task", "runs", "right", "unguarded"}
#: task -> the results for the arguments 3 and 5
TASKS: dict[str, tuple[Any, Any]] = {
    "double": (6, 10),
    "secret": ("answer-5ec2e700", "answer-0c0ffee0"),
    "list": ([3, 6], [5, 10]),
    "dict": ({"n": 3}, {"n": 5}),
}
_ARGUMENTS = (3, 5)
_SOLVED = "def double(n):\n    return {3: %r, 5: %r}[n]\n"
_MAIN = '\nif __name__ == "__main__":\n    print(double(int(input())))\n'
_GAINED = """
if gained(OUTSIDE):
    def double(n):
        return {3: %r, 5: %r}[n]
else:
    def double(n):
        return None
"""


@dataclass(frozen=True)
class Attack:
    """One attack. ``name``: folder and file, without suffix."""

    name: str
    source: str
    settings: dict[str, str]

    @property
    def kinds(self) -> list[str]:
        return self.settings["tests"].split()

    @property
    def task(self) -> str:
        return self.settings.get("task", "double")

    @property
    def runs(self) -> int:
        return int(self.settings.get("runs", "1"))

    @property
    def is_right(self) -> bool:
        return "right" in self.settings

    @property
    def gains_unguarded(self) -> bool:
        return self.settings.get("unguarded") == "gains"

    def program(self) -> str:
        """Return the program; ``OUTSIDE`` must be defined in front of it if the attack has ``gained``."""
        if "def gained(" not in self.source:
            return self.source
        return self.source + _GAINED % TASKS[self.task] + _MAIN

    def item(self, kind: str, outside: str = "") -> Item:
        """Return the item that a verifier judges. ``outside``: source that defines ``OUTSIDE``."""
        return item_of(self.program(), kind, self.task, outside)


def read_attacks() -> list[Attack]:
    """Read all attacks in the order of their names. Raises ValueError for a bad docstring."""
    return [_read(path) for path in sorted(FOLDER.glob("*/*.attack"))]


def _read(path: Path) -> Attack:
    source = path.read_text("utf-8")
    name = f"{path.parent.name}/{path.stem}"
    sentence, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    settings = dict(line.split(": ", 1) for line in rest.strip().splitlines())
    if not sentence.endswith(".") or not settings.keys() <= SETTINGS or "tests" not in settings:
        raise ValueError(f"attack {name}: its docstring must be a sentence and settings")
    return Attack(name, source, settings)


def item_of(program: str, kind: str, task: str = "double", preamble: str = "") -> Item:
    """Return a program with the tests of one kind."""
    return Item("", f"```python\n{program}```", "", {KEY: _as_json(code_tests(kind, task, preamble))})


def honest(kind: str, task: str = "double") -> Item:
    """Return a right program with the tests of one kind."""
    return item_of(_SOLVED % TASKS[task] + _MAIN, kind, task)


def code_tests(kind: str, task: str = "double", preamble: str = "") -> CodeTests:
    """Return the tests of one kind, with the limits of the suite."""
    pairs = list(zip(_ARGUMENTS, TASKS[task], strict=True))
    tests: dict[str, Any] = {
        "stdio": {"stdio": [StdioTest(f"{n}\n", f"{result}\n") for n, result in pairs]},
        "calls": {"calls": [CallTest([n], result) for n, result in pairs], "function": "double"},
        "source": {"source": _source(pairs)},
        "mapped": {"source": f"assert all(a == b for a, b in zip(map(double, {_ARGUMENTS}), {TASKS[task]!r}))\n"},
    }[kind]
    return CodeTests(preamble=preamble, time_limit_s=TIME_LIMIT_S, memory_limit_mb=MEMORY_LIMIT_MB, **tests)


def _source(pairs: list[tuple[int, Any]]) -> str:
    asserts = "".join(f"    assert candidate({n}) == {result!r}\n" for n, result in pairs)
    return f"def check(candidate):\n{asserts}\n\ncheck(double)\n"


def _as_json(tests: CodeTests) -> Any:
    return json.loads(msgspec.json.encode(tests))


# ---- A checker without isolation, as many are written: tests behind the program, in the same interpreter


_CALLS = """
import json
for arguments, expected in json.loads({calls!r}):
    if not {function}(*arguments) == expected:
        raise SystemExit(1)
"""
_TIMEOUT_S = 20.0


def passes_unguarded(program: str, tests: CodeTests, folder: Path, environment: dict[str, str]) -> bool:
    """Return True if the program passes: it ends with status 0, and its output is the expected one."""
    parts = [tests.preamble, program]
    if tests.source:
        parts.append(tests.source)
    if tests.calls:
        calls = msgspec.json.encode([(test.args, test.result) for test in tests.calls]).decode()
        parts.append(_CALLS.format(calls=calls, function=tests.function))
    for stdin, stdout in [(test.stdin, test.stdout) for test in tests.stdio] or [("", None)]:
        run = subprocess.run(
            [sys.executable, "-c", "\n".join(parts)],
            input=stdin.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            cwd=folder,
            env=environment,
        )
        if run.returncode or (stdout is not None and run.stdout.decode().strip() != stdout.strip()):
            return False
    return True

"""A checker without isolation, as many are written: tests behind the program, in the same interpreter.

It shows that an attack is one: with this checker it gets a passing verdict.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from realsys.data.lines import CodeTests

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

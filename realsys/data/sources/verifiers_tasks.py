"""Tasks of an environment of verifiers, listed by the interpreter that has it.

    verifiers:ENV ──env_python verifiers_program.py tasks──> lines ──> rows {"prompt", "answer", "verifiers"}

The key ``verifiers`` holds all that the agent of the same name needs to run the task: environment, arguments, task. The
prompt is text for people and for the split by its hash; the environment makes the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from realsys.cluster.children.child_process import how_it_ended
from realsys.config.schema_data import VERIFIERS
from realsys.data.sources.files import Rows, SourceRow
from realsys.errors import DataError

KEY = "verifiers"
PROGRAM = Path(__file__).with_name("verifiers_program.py")
ARGUMENTS = {"env_python", "args", "eval_args", "size"}
LIST_S = 1800.0  # an environment may download its data
_SHOWN = 1000  # last bytes of its output in an error
_NO_REFERENCE = "(judged by the environment)"


def program(python: str, command: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of ``verifiers_program.py``."""
    return [python, "-P", str(PROGRAM), command, json.dumps(settings)]


def surroundings(python: str) -> dict[str, str]:
    """Return the environment variables for that program. PATH begins with the folder of its interpreter."""
    folder = str(Path(python).parent)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def task_rows(name: str, split: str, arguments: Mapping[str, Any]) -> Rows:
    """Yield the tasks of the environment ``name``. Raises DataError.

    ``arguments``: ``env_python``, the interpreter that has verifiers; ``args``, the environment's configuration, in
    place of which ``data.eval`` uses ``eval_args`` if given; ``size``, the number of tasks (0: all of them).
    """
    where = f"{VERIFIERS}{name}"
    if unknown := sorted(set(arguments) - ARGUMENTS):
        raise DataError(f"{where}: unknown data.source_args {', '.join(unknown)}: use {', '.join(sorted(ARGUMENTS))}")
    python = interpreter(arguments.get("env_python"))
    args = dict(arguments.get("args", {}))
    if split == "eval":
        args = dict(arguments.get("eval_args", args))
    settings = {"env": name, "args": args, "size": int(arguments.get("size", 0))}
    for number, line in enumerate(_lines(where, python, program(python, "tasks", settings))):
        task = json.loads(line)
        stored = {"env": name, "args": args, "task": task["task"]}
        values = {"prompt": _prompt(task, f"{name} {number}"), "answer": _NO_REFERENCE, KEY: stored}
        yield SourceRow(f"{where}:task {number}", values)


def _lines(where: str, python: str, command: list[str]) -> Iterator[bytes]:
    """Yield the lines that the program writes, one by one: a data set may be larger than memory. Raises DataError."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, env=surroundings(python)
        )
        limit = threading.Timer(LIST_S, process.kill)
        limit.start()
        assert process.stdout is not None
        try:
            yield from process.stdout
            process.wait()
        finally:
            limit.cancel()
            process.kill()  # the reader may have stopped early; no effect after the end
            process.wait()
            process.stdout.close()
        if process.returncode:
            printed.seek(-min(printed.seek(0, os.SEEK_END), _SHOWN), os.SEEK_END)
            last = printed.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise DataError(f"{where}: {python} cannot list its tasks: {last or how_it_ended(process.returncode)}")


def interpreter(python: object) -> str:
    """Return the interpreter that ``env_python`` names. Raises DataError."""
    if not isinstance(python, str) or not python:
        raise DataError("data.source_args.env_python must be the path of an interpreter that has verifiers")
    path = os.path.abspath(os.path.expanduser(python))
    if not os.access(path, os.X_OK):
        raise DataError(f"{path}: not found or not a program: make it with `make verifiers-env`")
    return path


def _prompt(task: Mapping[str, Any], name: str) -> str | list[dict[str, Any]]:
    """Return the text or messages of a task; its name if the environment opens the conversation."""
    prompt: Any = task["prompt"] or task["name"] or name
    if not task["system"]:
        return prompt  # type: ignore[no-any-return]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": task["system"]}, *messages]

"""Fork servers: a forked program cannot be told from an executed one, and a server that fails is replaced by exec."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import ended

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.support.processes.shown_program"
pytestmark = pytest.mark.processes

#: a process with one thread, as a server needs: forks one, runs CODE
PRELUDE = """
import os, signal, sys, threading
from realsys.cluster.children.fork_server import ForkServer
PROGRAM = {program!r}
ARGV = [sys.executable, "-P", "-m", PROGRAM]
server = ForkServer.fork([*{modules!r}, PROGRAM])
def run(*words, env={{"MINE": "1", "LONG": "x" * 100_000, "LONGER": "y" * 100_000}}, inherit=()):
    return server.start([*ARGV, *words], env, 1, 2, inherit).wait()
"""


def script(code: str, *modules: str, **options: Any) -> subprocess.CompletedProcess[str]:
    prelude = PRELUDE.format(program=PROGRAM, modules=modules)
    return subprocess.run(
        [sys.executable, "-c", prelude + code], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


def test_forked_program_sees_what_an_executed_one_sees(tmp_path):
    own = tmp_path / "modules"
    own.mkdir()
    code = f"""
assert server.ready(60)
with open({str(tmp_path / "lock")!r}, "w") as lock:
    code = run("a b", "", env={{"MINE": "1", "PYTHONPATH": {str(own)!r}}}, inherit=[lock.fileno()])
run()
print(os.getpid(), code, len(os.listdir("/proc/self/fd")))
"""
    done = script(code, input="the terminal's")
    first, second, last = done.stdout.splitlines()
    shown, other, (parent, code, _) = json.loads(first), json.loads(second), map(int, last.split())
    words = [sys.executable, "-P", "-m", PROGRAM, "a b", ""]
    assert shown | {"paths": [], "random": 0, "environment": []} == {
        "parent": parent,
        "leads": True,
        "words": words,
        "environment": [],
        "variable": "1",
        "arguments": ["a b", ""],
        "paths": [],
        "main": PROGRAM,
        "stdin": "",
        "open": [str(tmp_path / "lock")],
        "random": 0,
    }
    assert "MINE=1" in shown["environment"] and code == 3
    assert shown["paths"][0] == str(own) and str(ROOT) not in shown["paths"][:1]
    assert shown["random"] != other["random"] and other["open"] == []


@pytest.mark.parametrize(
    ("word", "code", "text"), [("text", 1, "a last line\n"), ("raise", 1, "ValueError: out of range\n")]
)
def test_forked_program_ends_as_an_executed_one(word, code, text):
    done = script(f"assert server.ready(60); print(run({word!r}))")
    assert done.stdout == f"{code}\n" and done.stderr.endswith(text)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("threaded", "its modules have started 1 threads"),
    ],
)
def test_server_that_cannot_fork_is_not_ready(module, problem, tmp_path):
    (tmp_path / "threaded.py").write_text("from threading import *\nThread(target=Event().wait, daemon=True).start()\n")
    code = "print(server.ready(60), server.ready(60), server.runs(ARGV)); server.close()"
    done = script(code, module, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "False False False\n" and problem in done.stderr


def test_killed_server_runs_nothing_and_its_programs_go_on():
    code = """
assert server.ready(60) and server.runs(ARGV) and not server.runs([sys.executable, "-m", "other"])
reader, writer = os.pipe()
program = server.start(ARGV, {}, writer, 2)
os.kill(server._pid, signal.SIGKILL)
os.waitid(os.P_PID, server._pid, os.WEXITED | os.WNOWAIT)
print(server.runs(ARGV), program.wait(), server.runs(ARGV))
"""
    done = script(code)
    assert done.stdout == "False 3 False\n" and "so programs are executed: it has ended" in done.stderr


def test_server_ends_with_its_process():
    code = "assert server.ready(60); print(server._pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    pid = int(script(code).stdout)
    assert ended(pid)

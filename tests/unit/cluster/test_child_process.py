"""Child processes: groups, pids and descendants, with real processes."""

import asyncio
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from realsys.cluster.children import child_process
from realsys.cluster.children.child_process import (
    HEALTHY_AFTER_S,
    LONGEST_BACKOFF_S,
    Backoff,
    ChildProcess,
    GuardedProcess,
    LogBound,
    child_pids,
    how_it_ended,
    kill_descendants,
    resident_bytes_below,
)
from realsys.cluster.prctl import subreaper
from tests.support.polling import ended, poll

pytestmark = pytest.mark.processes

BOUND_S = 60.0
#: a child in its own session, whose pid is printed: neither the group's SIGKILL nor the parent's death reaches it
ESCAPED = (
    "import subprocess, sys; child = 'import signal; signal.pause()';"
    "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL};"
    "print(subprocess.Popen([sys.executable, '-c', child], start_new_session=True, **quiet).pid, flush=True)"
)


def start(script, output=subprocess.DEVNULL):
    return ChildProcess([sys.executable, "-c", script], os.environ, output)


def test_pid_stays_valid_until_reaped():
    async def body():
        process = start("raise SystemExit(3)")
        assert await process.exits_within(BOUND_S)
        assert process.returncode is None and psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        process.signal(signal.SIGTERM)
        process.kill()  # both do nothing to a zombie
        assert process.reap() == process.reap() == process.returncode == 3
        process.kill()
        assert not psutil.pid_exists(process.pid)

    descriptors = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_group_dies_with_its_leader(tmp_path):
    script = ESCAPED.replace("start_new_session=True, ", "")

    async def body():
        with (tmp_path / "out").open("wb") as out:
            process = start(script, out.fileno())
        assert await process.exits_within(BOUND_S)
        process.reap()
        return int((tmp_path / "out").read_text())

    with subreaper():
        grandchild = asyncio.run(body())
        assert psutil.Process(grandchild).wait(BOUND_S) == -signal.SIGKILL


def test_descendants_are_killed_wherever_they_hide(tmp_path):
    earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    spare = child_pids()
    try:
        with subreaper():
            escaped = subprocess.run([sys.executable, "-c", ESCAPED], capture_output=True, text=True, check=True).stdout
            [killed] = kill_descendants(BOUND_S, spare)
        assert f"(pid {int(escaped)})" in killed and not psutil.pid_exists(int(escaped))
        assert earlier.poll() is None
    finally:
        earlier.communicate(b"\n")


def test_process_that_may_end_is_waited_for():
    waits = "import sys; sys.stdin.read()"
    spare = child_pids()
    slow = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)
    assert kill_descendants(0.2, spare, may_end=lambda process: True) == []
    slow.stdin.close()
    assert kill_descendants(BOUND_S, spare, may_end=lambda process: True) == []
    assert not psutil.pid_exists(slow.pid)
    slow.wait()


def test_delays_double_until_the_budget_is_spent():
    backoff = Backoff(8, 0.5)
    delays = [backoff.next_delay(1.0) for _ in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S, None]
    assert backoff.next_delay(HEALTHY_AFTER_S + 1) == 0.5 and backoff.restarts == 1


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exited with code 0"),
        (75, "exited with code 75"),
        (-15, "was killed by SIGTERM"),
        (-99, "was killed by signal 99"),
    ],
)
def test_end_of_a_process_in_words(returncode, words):
    assert how_it_ended(returncode) == words


# ---- Fork servers: a forked program cannot be told from an executed one, and a server that fails is replaced by exec


ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.support.processes.shown_program"

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


def script(code, *modules, **options):
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


# ---- A server of another package under its guard: log, last words, and an end that leaves no process and no file


WAIT_S = 60.0
# Starts a process that leads another session, prints its pid, and waits.
SERVER = ["sh", "-c", 'setsid sleep 1000 & echo "helper $! up"; wait']


def with_server(tmp_path, command, body, *guard):
    """Run ``body(process)`` while the guarded ``command`` runs; its temporary files are in ``tmp_path``/scratch."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    async def run():
        process = GuardedProcess("Server", command, os.environ, scratch, guard)
        try:
            async with asyncio.timeout(WAIT_S):
                return await body(process)
        finally:
            await process.stop()

    return asyncio.run(run())


def test_last_words_name_status_and_lines(tmp_path):
    async def body(process):
        return await process.last_words()

    words = with_server(tmp_path, ["sh", "-c", "echo one; echo two >&2; exit 3"], body)
    assert words == "Server exited with code 3; its last lines: one | two"


def test_flood_of_a_dying_server_is_cut_after_its_cause(tmp_path, caplog, monkeypatch):
    """As vLLM, which prints a traceback for each open request."""
    monkeypatch.setattr(child_process, "_LOG_WINDOW_S", math.inf)
    flood = "import sys; print('cause'); [print('x' * 99) for _ in range(30_000)]; print('the end'); sys.exit(3)"

    async def body(process):
        return await process.last_words()

    with caplog.at_level(logging.INFO, logger="server"):
        words = with_server(tmp_path, [sys.executable, "-c", flood], body)
    assert words.startswith("Server exited with code 3; ") and words.endswith("| the end")
    logged = [record.getMessage() for record in caplog.records if record.name == "server"]
    assert logged[0] == "cause" and sum(map(len, logged)) < 250_000
    assert logged[-1] == f"{30_002 - len(logged) + 1} lines left out: more than 200000 characters in a minute"


def test_last_words_begin_with_the_first_error(tmp_path):
    """As of vLLM, whose server ends with an error that names no cause."""
    lines = ["WARNING: as of `OSError: x`", "(Core pid=1) ERROR 11-28 [core.py:9] ValueError: no memory", "KeyError: 3"]
    code = f"[print(line) for line in {lines}]; [print(i) for i in range(40)]"

    async def body(process):
        return await process.last_words()

    words = with_server(tmp_path, [sys.executable, "-c", code], body)
    assert f"; its last lines: {lines[1]} | ... | 25 | 26 " in words


def test_bound_of_a_log_counts_what_it_leaves_out():
    bound = LogBound(10, 60.0)
    assert bound.closed(5.0) == 0
    assert [bound.admits(6), bound.admits(6), bound.admits(1)] == [True, False, False]
    assert bound.closed(64.0) == 0
    assert bound.closed(65.0) == 2
    assert bound.admits(10) and bound.closed(66.0) == bound.left_out == 0


def test_command_that_is_not_found_ends(tmp_path):
    async def body(process):
        return await process.last_words()

    words = with_server(tmp_path, ["/no/such/program"], body)
    assert words.startswith("Server exited with code 127; its last lines: cannot start /no/such/program: No such file")


def test_stop_leaves_no_process(tmp_path, caplog):
    async def body(process):
        while not process.tail().startswith("helper"):
            await asyncio.wait({process.ended}, timeout=0.01)
        await process.stop()
        return int(process.tail().split()[1])

    assert ended(with_server(tmp_path, SERVER, body))
    assert list(tmp_path.iterdir()) == []


def test_grace_lets_the_command_clean_up(tmp_path):
    file = tmp_path / "cleaned"
    command = ["sh", "-c", f"trap 'touch {file}; exit' TERM; echo up; while :; do sleep 0.01; done"]

    async def body(process):
        while process.tail() != "up":
            await asyncio.wait({process.ended}, timeout=0.01)

    with_server(tmp_path, command, body, "--grace", "30")
    assert file.exists()


def test_nothing_outlives_a_killed_worker(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import asyncio, logging, os, sys\n"
        "from pathlib import Path\n"
        "from realsys.cluster.children.child_process import GuardedProcess\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "async def main():\n"
        f"    process = GuardedProcess('Server', {SERVER!r}, os.environ, Path({str(scratch)!r}))\n"
        "    print('guard', process.pid, flush=True)\n"
        "    await process.ended\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    text = ""
    for line in worker.stdout:
        text += line
        if re.search(r"helper \d+ up", line):
            break
    assert scratch.is_dir()
    worker.send_signal(signal.SIGKILL)
    worker.wait(WAIT_S)
    worker.stdout.close()
    guard, helper = (int(re.search(rf"{name} (\d+)", text)[1]) for name in ("guard", "helper"))
    assert ended(guard) and ended(helper)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_all_processes(tmp_path):
    """The helper in another session counts, and a second look within seconds measures nothing."""

    async def body(process):
        def processes():
            return psutil.Process(process.pid).children(recursive=True)

        def are_there():
            """setsid becomes the helper after it has its pid, so the pid alone does not tell."""
            return {"sh", "sleep"} <= {each.name() for each in processes()}

        await asyncio.to_thread(poll, are_there, "sh and the helper", WAIT_S)
        expected = sum(each.memory_info().rss for each in processes())
        assert await process.resident_bytes() == pytest.approx(expected, rel=0.2)
        process.kill()
        await process.ended
        assert await process.resident_bytes() == pytest.approx(expected, rel=0.2)

    with_server(tmp_path, SERVER, body)


def test_memory_of_ended_process_is_zero():
    child = subprocess.Popen(["true"])
    child.wait()
    assert resident_bytes_below(child.pid) == 0

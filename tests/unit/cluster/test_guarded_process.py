"""A server of another package under its guard: log, last words, and an end that leaves no process and no file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from realsys.cluster.children.child_process import GuardedProcess, resident_bytes_below
from tests.support.polling import ended, poll

pytestmark = pytest.mark.processes

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
    assert worker.stdout is not None
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

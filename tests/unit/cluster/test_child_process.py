"""Child processes: groups, pids and descendants, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from realsys.cluster.children.child_process import (
    HEALTHY_AFTER_S,
    LONGEST_BACKOFF_S,
    Backoff,
    ChildProcess,
    child_pids,
    how_it_ended,
    kill_descendants,
)
from realsys.cluster.prctl import subreaper

pytestmark = pytest.mark.processes

BOUND_S = 60.0
#: a child in its own session, whose pid is printed: neither the group's SIGKILL nor the parent's death reaches it
ESCAPED = (
    "import subprocess, sys; child = 'import signal; signal.pause()';"
    "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL};"
    "print(subprocess.Popen([sys.executable, '-c', child], start_new_session=True, **quiet).pid, flush=True)"
)


def start(script: str, output: int = subprocess.DEVNULL) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", script], os.environ, output)


def test_pid_stays_valid_until_reaped() -> None:
    async def body() -> None:
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


def test_group_dies_with_its_leader(tmp_path: Path) -> None:
    script = ESCAPED.replace("start_new_session=True, ", "")

    async def body() -> int:
        with (tmp_path / "out").open("wb") as out:
            process = start(script, out.fileno())
        assert await process.exits_within(BOUND_S)
        process.reap()
        return int((tmp_path / "out").read_text())

    with subreaper():
        grandchild = asyncio.run(body())
        assert psutil.Process(grandchild).wait(BOUND_S) == -signal.SIGKILL


def test_descendants_are_killed_wherever_they_hide(tmp_path: Path) -> None:
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


def test_process_that_may_end_is_waited_for() -> None:
    waits = "import sys; sys.stdin.read()"
    spare = child_pids()
    slow = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)
    assert slow.stdin is not None
    assert kill_descendants(0.2, spare, may_end=lambda process: True) == []
    slow.stdin.close()
    assert kill_descendants(BOUND_S, spare, may_end=lambda process: True) == []
    assert not psutil.pid_exists(slow.pid)
    slow.wait()


def test_delays_double_until_the_budget_is_spent() -> None:
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
def test_end_of_a_process_in_words(returncode: int, words: str) -> None:
    assert how_it_ended(returncode) == words

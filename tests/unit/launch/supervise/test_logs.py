"""The logs of processes: bounded, while whoever writes goes on, and with the last and the first words still there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from realsys.launch.supervise.failures import before, ending, keep_bounded, last_words, shorten, tail
from tests.support.processes.supervised import FOREVER, Trial

INNER = "import sys\nfor line in sys.stdin: print('inner', line.strip(), flush=True)"
OUTER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {INNER!r}], stdin=subprocess.PIPE, text=True)
for line in sys.stdin:
    print("outer", line.strip(), file=sys.stderr, flush=True)
    child.stdin.write(line)
    child.stdin.flush()
child.stdin.close()
child.wait()
"""


def test_log_within_its_bound_stays_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    shorten(log, 10)
    assert not log.exists()
    log.write_bytes(b"0123456789")
    shorten(log, 10)
    assert log.read_bytes() == b"0123456789" and not before(log).exists()


@pytest.mark.processes
def test_no_line_of_two_writers_is_lost(tmp_path: Path) -> None:
    """The second one got the open file from the first, as an engine gets it from its worker."""
    log = tmp_path / "x.log"
    seen: list[str] = []
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", OUTER], stdin=subprocess.PIPE, stdout=file, stderr=file, text=True
        )
    assert process.stdin is not None
    with process:
        for number in range(3):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            while log.read_text().count("\n") < 2:  # both have written
                assert process.poll() is None
            shorten(log, 1)
            seen += before(log).read_text().splitlines()
            assert log.stat().st_size == 0
        process.stdin.write("3\n")
        process.stdin.close()
    seen += log.read_text().splitlines()
    assert sorted(seen) == sorted(f"{who} {number}" for who in ("inner", "outer") for number in range(4))
    assert b"\0" not in log.read_bytes(), "written at the beginning, not where the file had ended"


def test_last_lines_are_found_after_emptying(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    shorten(log, 10)
    assert tail(log, 2) == ["line 98", "line 99"]
    with log.open("a") as file:
        file.write("the end\n")
    assert tail(log, 2) == ["line 99", "the end"] and ending(log, 12) == b"e 99\nthe end\n"[-12:]
    assert ending(tmp_path / "none.log", 10) == b""


def test_logs_never_exceed_two_files_for_long(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for number in range(100):
        with log.open("a") as file:
            file.write(f"line {number:03d}\n" * 10)
        shorten(log, 500)
        assert log.stat().st_size <= 500 and (not before(log).exists() or before(log).stat().st_size <= 600)
    assert tail(log, 1) == ["line 099"]


def test_logs_are_bounded_although_one_cannot_be(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    for log in (bad, good):
        log.write_bytes(b"x" * 100)
    before(bad).mkdir()

    async def body() -> None:
        task = asyncio.create_task(keep_bounded({bad: 10, good: 10}))
        async with asyncio.timeout(30):
            while not before(good).exists() or good.stat().st_size:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert bad.stat().st_size == 100 and before(good).read_bytes() == b"x" * 100


@pytest.mark.processes
def test_last_words_of_the_first_death_are_kept(tmp_path: Path) -> None:
    trial, marker = Trial(tmp_path), tmp_path / "marker"
    script = f"import os, sys; print('again' if os.path.exists({str(marker)!r}) else 'the cause'); "
    script += f"open({str(marker)!r}, 'w').close(); sys.exit(3)"
    outcome = trial.run(trial.spec("rollout_worker", 0, script), trial.spec("master_worker", 0, FOREVER))
    assert len(outcome.restarted) == 2
    log = tmp_path / "rollout_worker-0.log"
    assert last_words(log).read_text() == "the cause\n"
    assert log.read_text() == "the cause\nagain\nagain\n"
    assert not last_words(tmp_path / "master_worker-0.log").exists(), "it was not restarted"

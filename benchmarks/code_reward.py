"""Verdicts per second of the verifier ``code`` on one core, for trivial programs, against a bare subprocess.

    python -m benchmarks.code_reward [--items 200] [--rounds 5]

All processes are on one core: this one, the verifier process, the programs. Rounds of the two contenders take turns.

    verdicts_per_s  items that are given together, median of the rounds
    bare_per_s      ``subprocess.run([python, file])`` with the tests in the file, nothing isolated
    of_bare         their ratio
    p50_ms, p99_ms  time of one verdict, items given one by one
    cpu_ms          CPU time of all processes for one verdict
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks._table import report
from benchmarks._verdicts import Judge, judges
from tests.support.sandbox.attacks import code_tests, honest

_PROGRAM = "def double(n):\n    return 2 * n\n"
_BARE = {
    "stdio": f"{_PROGRAM}\nprint(double(int(input())))\n",
    "calls": f"{_PROGRAM}\nassert double(3) == 6\nassert double(5) == 10\n",
    "source": f"{_PROGRAM}\n{code_tests('source').source}",
}


def bare(kind: str, file: Path) -> bool:
    """Judge the program of a kind as a plain script would."""
    file.write_text(_BARE[kind])
    tests = code_tests(kind).stdio
    for stdin, stdout in [(test.stdin, test.stdout) for test in tests] or [("", "")]:
        run = subprocess.run([sys.executable, str(file)], input=stdin.encode(), capture_output=True)
        if run.returncode or run.stdout.decode() != stdout:
            return False
    return True


def per_s(count: int, work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def cpu_s() -> float:
    """Return the CPU time of this process and all below it."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in [own, *own.children(recursive=True)])


def row(judge: Judge, kind: str, items: int, rounds: int, file: Path) -> dict[str, Any]:
    batch = [honest(kind)] * items
    assert all(judge.all(batch[:20])) and bare(kind, file)
    together, alone, times_ms, used_s = [], [], [], 0.0
    few = max(1, items // 10)
    for _ in range(rounds):
        before_s = cpu_s()
        together.append(per_s(items, lambda: judge.all(batch)))
        used_s += cpu_s() - before_s
        alone.append(per_s(few, lambda: [bare(kind, file) for _ in range(few)]))
        for item in batch:
            begin = time.perf_counter()
            judge.one(item)
            times_ms.append(1e3 * (time.perf_counter() - begin))
    percentiles = statistics.quantiles(times_ms, n=100)
    verdicts, plain = statistics.median(together), statistics.median(alone)
    return {
        "tests": kind,
        "verdicts_per_s": verdicts,
        "bare_per_s": plain,
        "of_bare": verdicts / plain,
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "cpu_ms": 1e3 * used_s / (items * rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200, help="programs per round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    load = os.getloadavg()[0]
    with judges() as judge, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        rows = [row(judge, kind, arguments.items, arguments.rounds, file) for kind in _BARE]
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    meta = {**vars(arguments), "load_before": round(load, 2), "largest_child_mb": round(peak_mb)}
    report("code_reward", rows, meta)


if __name__ == "__main__":
    main()

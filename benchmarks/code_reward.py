"""Verdicts per second of the verifier ``code`` on one core, for programs with one test, against a bare subprocess.

    python -m benchmarks.code_reward [--items 200] [--rounds 5]

All processes are on one core: this one, the verifier process, the programs. Rounds of the two contenders take turns.

    verdicts_per_s  items that are given together, median of the rounds
    bare_per_s      ``subprocess.run([python, file])`` with the tests in the file, nothing isolated
    of_bare         their ratio
    p50_ms, p99_ms  time of one verdict, items given one by one
    cpu_ms          CPU time of all processes for one verdict
    bare_cpu_ms     CPU time of the subprocess
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

from benchmarks._table import report
from benchmarks._verdicts import Judge, cpu_s, judges
from realsys.reward.verifiers.contract import Item

_PROGRAM = "def double(n):\n    return 2 * n\n\n\nif __name__ == '__main__':\n    print(double(int(input())))\n"
_TESTS: dict[str, dict[str, Any]] = {
    "stdio": {"stdio": [{"stdin": "3\n", "stdout": "6\n"}]},
    "calls": {"function": "double", "calls": [{"args": [3], "result": 6}]},
    "source": {"function": "double", "source": "def check(f):\n    assert f(3) == 6\n\n\ncheck(double)\n"},
}
#: what a plain script would append to the program
_APPENDED = {"stdio": "", "calls": "assert double(3) == 6\n", "source": _TESTS["source"]["source"]}


def item(kind: str) -> Item:
    return Item("", f"```python\n{_PROGRAM}```", "", {"code_tests": _TESTS[kind]})


def bare(kind: str, file: Path) -> bool:
    """Judge the program as a plain script would."""
    file.write_text(_PROGRAM + _APPENDED[kind])
    run = subprocess.run([sys.executable, str(file)], input=b"3\n", capture_output=True)
    return run.returncode == 0 and run.stdout == b"6\n"


def per_s(count: int, work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return count / (time.perf_counter() - begin)


def ended_s() -> float:
    """Return the CPU time of the ended child processes: the verifier process is none of them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(judge: Judge, kind: str, items: int, rounds: int, file: Path) -> dict[str, Any]:
    batch = [item(kind)] * items
    assert all(judge.all(batch[:20])) and bare(kind, file)
    together, alone, times_ms, used_s, bare_s = [], [], [], 0.0, ended_s()
    few = max(1, items // 10)
    for _ in range(rounds):
        before_s = cpu_s()
        together.append(per_s(items, lambda: judge.all(batch)))
        used_s += cpu_s() - before_s
        alone.append(per_s(few, lambda: [bare(kind, file) for _ in range(few)]))
        for each in batch:
            begin = time.perf_counter()
            judge.one(each)
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
        "bare_cpu_ms": 1e3 * (ended_s() - bare_s) / (few * rounds),
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
        rows = [row(judge, kind, arguments.items, arguments.rounds, file) for kind in _TESTS]
    report("code_reward", rows, {**vars(arguments), "load_before": round(load, 2)})


if __name__ == "__main__":
    main()

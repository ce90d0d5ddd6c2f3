"""Verdict rate of a neighbour while attacks run on the other core. Each has its verifier pool.

    python -m benchmarks.code_neighbours [--rounds 3] [--seconds 0.6] [--only NAME ...]

The neighbour judges honest programs on one core, the attack runs again and again on the other. Windows with and without
the attack take turns. Attacks on time, memory, disk and processes have a row each; the others share one per folder.

    without, beside  verdicts per second of the neighbour, median of the windows
    slower           percentage by which the neighbour is slower, median of the neighbouring windows
    cpu_more         percentage of CPU time that a verdict of the neighbour takes more; it depends less on other work
    wrong            verdicts on the neighbour's programs that were not "right"
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._processes import helper_processes
from benchmarks._table import report
from benchmarks._verdicts import cpu_s, judges
from realsys.reward.verifiers.base import Item
from tests.support.sandbox.attacks import Attack, honest, read_attacks
from tests.support.sandbox.surroundings import Outside, opened

OWN_ROW = ("memory", "resources", "limits", "processes")
_BOUND_S = 60.0
#: programs to compare with: they do no harm
_HARMLESS = [
    Attack("a program that sleeps", "", "import time\ntime.sleep(0.4)\n", {"tests": "stdio"}),
    Attack("a program that computes", "", "print(sum(range(10_000_000)))\n", {"tests": "stdio"}),
]


@dataclass(frozen=True)
class Window:
    """The neighbour's work in a window."""

    verdicts: int
    elapsed_s: float
    cpu_s: float
    wrong: int

    @property
    def rate(self) -> float:
        return self.verdicts / self.elapsed_s


def neighbour(core: int, pipe: Connection) -> None:
    """Judge honest programs for as many seconds as the pipe says; answer with verdicts per second and wrong ones."""
    os.sched_setaffinity(0, {core})
    kinds = itertools.cycle(("stdio", "calls", "source"))
    with judges() as judge:
        assert judge.one(honest("stdio"))
        pipe.send(None)
        while True:
            seconds, begin = pipe.recv(), time.perf_counter()
            count = wrong = 0
            before_s = cpu_s()
            while (passed := time.perf_counter() - begin) < seconds:
                wrong += judge.one(honest(next(kinds))) is not True
                count += 1
            pipe.send(Window(count, passed, cpu_s() - before_s, wrong))


def attacker(core: int, pipe: Connection) -> None:
    """Run the items of the pipe again and again, until the next message."""
    os.sched_setaffinity(0, {core})
    with judges() as judge:
        judge.one(honest("stdio"))
        pipe.send(None)
        while True:
            items: list[Item] = pipe.recv()
            turns = itertools.cycle(items)
            pipe.send(None)
            while not pipe.poll():
                judge.one(next(turns))
            pipe.recv()
            pipe.send(None)


def subjects(only: list[str]) -> dict[str, list[Attack]]:
    """Return the attacks of each row."""
    rows = {attack.name: [attack] for attack in _HARMLESS}
    for attack in read_attacks():
        folder = attack.name.partition("/")[0]
        name = attack.name if folder in OWN_ROW else f"all of {folder}"
        if not only or name in only:
            rows.setdefault(name, []).append(attack)
    return rows


def measure(items: list[Item], ours: Connection, theirs: Connection, arguments: argparse.Namespace) -> dict[str, Any]:
    without: list[Window] = []
    beside: list[Window] = []

    def window(windows: list[Window]) -> None:
        ours.send(arguments.seconds)
        windows.append(ours.recv())

    for _ in range(arguments.rounds):
        window(without)
        theirs.send(items)
        theirs.recv()
        time.sleep(0.1)  # the attack is under way
        window(beside)
        theirs.send(None)
        assert theirs.poll(_BOUND_S), "the attack did not end"
        theirs.recv()
    window(without)
    # Each window with an attack is compared with the windows before and behind it.
    pairs = zip(beside, without, without[1:], strict=False)
    losses = [1 - 2 * during.rate / (before.rate + behind.rate) for during, before, behind in pairs]
    return {
        "without": statistics.median(each.rate for each in without),
        "beside": statistics.median(each.rate for each in beside),
        "slower": 100 * statistics.median(losses),
        "cpu_more": 100 * (_cpu_per_verdict(beside) / _cpu_per_verdict(without) - 1),
        "wrong": sum(each.wrong for each in [*without, *beside]),
    }


def _cpu_per_verdict(windows: list[Window]) -> float:
    return sum(each.cpu_s for each in windows) / sum(each.verdicts for each in windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a window")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows to measure")
    arguments = parser.parse_args()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    load, rows = os.getloadavg()[0], []
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(Outside(Path(folder))) as outside,
        helper_processes(neighbour, [(first,)], _BOUND_S) as (ours,),
        helper_processes(attacker, [(second,)], _BOUND_S) as (theirs,),
    ):
        for name, attacks in subjects(arguments.only).items():
            begin = time.monotonic()
            items = [attack.item(kind, outside.source()) for attack in attacks for kind in attack.kinds]
            rows.append({"attack": name, **measure(items, ours, theirs, arguments)})
            print(f"{rows[-1]} ({time.monotonic() - begin:.0f} s)", flush=True)
    report("code_neighbours", rows, {**vars(arguments), "load_before": round(load, 2)})


if __name__ == "__main__":
    main()

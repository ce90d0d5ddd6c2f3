"""Verdict rate of a neighbour while attacks run on the other core. Each has its verifier pool.

    python -m benchmarks.code_neighbours [--rounds 3] [--seconds 0.5] [--only NAME ...]

The neighbour judges right programs on one core. Three kinds of windows take turns: the other core is idle, judges a
harmless program that computes, or runs the attack, again and again. Attacks on time, memory and descriptors have a row
each; the others share one per folder.

    idle, busy, beside  verdicts per second of the neighbour in the three kinds of windows, medians
    slower              percentage by which it is slower beside the attack than beside the idle core, median of rounds
    slower_than_busy    the same, compared with the harmless program: what the attack adds to the use of a core
    wrong               verdicts on the neighbour's programs that were not "right"
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._processes import helper_processes
from benchmarks._table import report
from benchmarks._verdicts import judges
from realsys.reward.verifiers.contract import Item
from tests.support.sandbox.attacks import Attack, honest, read_attacks
from tests.support.sandbox.surroundings import Outside, opened

OWN_ROW = ("memory", "resources", "limits")
_BOUND_S = 60.0
_HARMLESS = Attack("harmless", "", "print(sum(range(10_000_000)))\n", {"tests": "stdio"})


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
            while (passed := time.perf_counter() - begin) < seconds:
                wrong += judge.one(honest(next(kinds))) is not True
                count += 1
            pipe.send((count / passed, wrong))


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
    rows: dict[str, list[Attack]] = {}
    for attack in read_attacks():
        folder = attack.name.partition("/")[0]
        name = attack.name if folder in OWN_ROW else f"all of {folder}"
        if not only or name in only:
            rows.setdefault(name, []).append(attack)
    return rows


def measure(items: list[Item], ours: Connection, theirs: Connection, arguments: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"idle": [], "busy": [], "beside": []}
    programs = {"idle": [], "busy": [_HARMLESS.item("stdio")], "beside": items}
    wrong = 0
    for _, kind in itertools.product(range(arguments.rounds), rates):
        if programs[kind]:
            theirs.send(programs[kind])
            theirs.recv()
            time.sleep(0.1)  # it is under way
        ours.send(arguments.seconds)
        rate, errors = ours.recv()
        rates[kind].append(rate)
        wrong += errors
        if programs[kind]:
            theirs.send(None)
            assert theirs.poll(_BOUND_S), "the attack did not end"
            theirs.recv()
    return {
        **{kind: statistics.median(each) for kind, each in rates.items()},
        "slower": _slower(rates["beside"], rates["idle"]),
        "slower_than_busy": _slower(rates["beside"], rates["busy"]),
        "wrong": wrong,
    }


def _slower(rates: list[float], compared: list[float]) -> float:
    return 100 * statistics.median(1 - one / other for one, other in zip(rates, compared, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a window")
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

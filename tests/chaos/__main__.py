"""``python -m tests.chaos``: every fault at every phase, and the table of what became of them.

Ctrl-C, SIGTERM and SIGHUP end its runs within seconds; nothing of them is left then.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from tests.chaos.driver import CaseResult, run_case
from tests.chaos.live import Interrupted
from tests.chaos.schedule.cases import chosen, full, short
from tests.chaos.schedule.rows import Case
from tests.chaos.table import render
from tests.conftest import SESSION_MARK


def main() -> int:
    arguments = _parser().parse_args()
    os.environ.setdefault(SESSION_MARK, uuid.uuid4().hex)
    cases = chosen(short() if arguments.short else full(arguments.seed), arguments.only, arguments.fault)
    if not cases:
        print(f"chaos: no case matches {' '.join([*arguments.only, *arguments.fault])}", file=sys.stderr)
        return 2
    if arguments.minutes:  # a sample: other seeds begin with other runs
        random.Random(arguments.seed).shuffle(cases)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="realsys-chaos-"))
    began = time.monotonic()
    stop = _Stop()
    results = _run_all(cases, folder, arguments.jobs, stop, began + 60 * (arguments.minutes or math.inf))
    if stop.number:
        print(f"chaos: stopped by {signal.Signals(stop.number).name}; {len(results)} runs of {len(cases)} were over")
    else:
        _report(results, arguments, time.monotonic() - began)
    wrong = [result for result in results if not result.good]
    for result in wrong:
        print(f"\n== {result.name}: {'; '.join(result.problems) or 'see its rows'}\n{result.report}", file=sys.stderr)
    if not arguments.folder:
        with contextlib.suppress(OSError):  # what went wrong is in it
            folder.rmdir()
    return 128 + stop.number if stop.number else int(bool(wrong))


class _Stop:
    """``event`` is set by a signal, ``number`` says by which."""

    def __init__(self) -> None:
        self.event, self.number = threading.Event(), 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number
        self.event.set()


def _run_all(cases: Sequence[Case], folder: Path, jobs: int, stop: _Stop, last_start: float) -> list[CaseResult]:
    """Return the results of those that were over before ``stop``. None starts after ``last_start``."""

    def run(case: Case) -> CaseResult | None:
        with contextlib.suppress(Interrupted):
            return None if stop.event.is_set() or time.monotonic() > last_start else _run(case, folder, stop.event)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        return [result for result in pool.map(run, cases) if result is not None]


def _run(case: Case, folder: Path, stop: threading.Event) -> CaseResult:
    result = run_case(case, folder / case.name, stop)
    verdict = "ok" if result.good else "; ".join(result.problems) or "see its rows"
    print(f"{case.name}: {len(case.rows)} faults, {result.seconds:.0f} s: {verdict}", file=sys.stderr, flush=True)
    return result


def _report(results: Sequence[CaseResult], arguments: argparse.Namespace, took: float) -> None:
    print(render(results))
    rows = [row for result in results for row in result.rows]
    bad = sum(not row.good for row in rows)
    print(f"\nseed {arguments.seed}: {len(rows)} faults in {len(results)} runs, {bad} of them bad, {took:.0f} s")
    if arguments.json and not (arguments.only or arguments.fault or arguments.short or arguments.minutes):
        about = {"seed": arguments.seed, "jobs": arguments.jobs, "cores": os.cpu_count(), "seconds": round(took, 1)}
        outcome = {**about, "cases": [result.as_json() for result in results]}
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which faults share a run, and their order (default 1)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="runs with this in their name")
    parser.add_argument("--fault", nargs="*", default=[], metavar="TEXT", help='rows with this in "fault, phase"')
    parser.add_argument("--short", action="store_true", help="the few that `make test` has")
    parser.add_argument("--minutes", type=float, help="a sample, chosen by the seed: start no run after this time")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also as JSON, if everything was run")
    parser.add_argument("--folder", type=Path, help="of the runs; bad ones stay (default: temporary)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

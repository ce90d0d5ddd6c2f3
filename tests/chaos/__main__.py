"""``python -m tests.chaos``: every fault at every phase, and the table of what became of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.cases import Case, full, short
from tests.chaos.driver import CaseResult, run_case
from tests.chaos.table import render
from tests.conftest import SESSION_MARK


def main() -> int:
    arguments = _parser().parse_args()
    os.environ.setdefault(SESSION_MARK, uuid.uuid4().hex)
    cases = short() if arguments.short else full(arguments.seed)
    cases = [case for case in cases if not arguments.only or any(part in case.name for part in arguments.only)]
    if not cases:
        print(f"chaos: no case matches {' '.join(arguments.only)}", file=sys.stderr)
        return 2
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="realsys-chaos-"))
    began = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda case: _run(case, folder), cases))
    print(render(results))
    rows = [row for result in results for row in result.rows]
    bad = sum(not row.good for row in rows)
    took = time.monotonic() - began
    print(f"\nseed {arguments.seed}: {len(rows)} faults in {len(results)} runs, {bad} of them bad, {took:.0f} s")
    if arguments.json:
        outcome = {"seed": arguments.seed, "seconds": round(took, 1), "cases": [r.as_json() for r in results]}
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n")
    wrong = [result for result in results if not result.good]
    for result in wrong:
        print(f"\n== {result.name}: {'; '.join(result.problems) or 'see its rows'}\n{result.report}", file=sys.stderr)
    if not wrong and not arguments.folder:
        folder.rmdir()
    return 1 if wrong else 0


def _run(case: Case, folder: Path) -> CaseResult:
    result = run_case(case, folder / case.name)
    verdict = "ok" if result.good else "; ".join(result.problems) or "see its rows"
    print(f"{case.name}: {len(case.rows)} faults, {result.seconds:.0f} s: {verdict}", file=sys.stderr, flush=True)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="order of the phases (default 1)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases with this in their name")
    parser.add_argument("--short", action="store_true", help="the few that `make test` has")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument("--folder", type=Path, help="of the runs; bad ones stay (default: temporary)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Every decoder against seeded mutations of valid messages, and noise.

A decoder takes an input or raises an error that it promises. A crash, a hang or memory without bound is a defect. The
suite is ``tests/support/fuzz``.

    python -m benchmarks.fuzz [--inputs N] [--seed S] [--only PART]
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._table import format_table, report
from tests.support.fuzz.suite import all_targets
from tests.support.fuzz.targets import Outcome, run

INPUTS = 120_000
MEMORY = Path("/dev/shm")  # files are written 100,000 times
HANG_S = 400  # the inputs of one decoder never take this long; the stacks are dumped then
HEADROOM = 4 << 30  # bytes of address space that decoding may take: an absurd size in a header is then a crash


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="in total")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # every rejection is logged somewhere
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, all_targets(Path(folder)) as targets:
        limit_memory()
        chosen = [target for target in targets if options.only in target.name]
        share = options.inputs / sum(target.weight for target in chosen)
        rows: list[dict[str, Any]] = []
        outcomes: list[Outcome] = []
        for target in chosen:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            before = peak_mib()
            outcomes.append(run(target, -(-int(share * target.weight) // 1), options.seed))
            rows.append(row_of(outcomes[-1], peak_mib() - before))
            faulthandler.cancel_dump_traceback_later()
            print(f"{target.name}: {rows[-1]['crashes']} crashes", file=sys.stderr)
    rows.append(total_of(outcomes))
    if options.only:  # a part is not the result
        print(format_table(rows))
    else:
        report("fuzz", rows, {"seed": options.seed})
    crashes = [crash for outcome in outcomes for crash in outcome.crashes[:3]]
    print("\n\n".join(crashes), file=sys.stderr)
    return 1 if crashes else 0


def row_of(outcome: Outcome, mib: float) -> dict[str, Any]:
    return {
        "decoder": outcome.name,
        "inputs": outcome.inputs,
        "accepted": outcome.accepted,
        "rejected": outcome.rejected.total(),
        "as": ", ".join(sorted(outcome.rejected)),
        "crashes": len(outcome.crashes),
        "slowest ms": round(outcome.slowest_s * 1e3, 3),
        "peak MiB": round(mib, 1),
    }


def total_of(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "decoder": "all",
        "inputs": sum(o.inputs for o in outcomes),
        "accepted": sum(o.accepted for o in outcomes),
        "rejected": sum(o.rejected.total() for o in outcomes),
        "as": "",
        "crashes": sum(len(o.crashes) for o in outcomes),
        "slowest ms": round(max(o.slowest_s for o in outcomes) * 1e3, 3),
        "peak MiB": round(peak_mib(), 1),
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_memory() -> None:
    """From here on, address space for what there is and ``HEADROOM`` more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    sys.exit(main())

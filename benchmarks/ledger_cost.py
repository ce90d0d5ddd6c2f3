"""Cost of never losing a group: the arith job with ledger, leases and acknowledgements, against itself without.

    python -m benchmarks.ledger_cost [--pairs 4] [--steps 80] [--groups 16] [--override KEY=VALUE ...]

Pairs of runs, ``on`` and ``off``, on one training rank and one server (``_pairs.py``). ``off`` is the same program with
its journal, leases and acknowledgements taken out from outside (``without_ledger/sitecustomize.py``): the product has
no such switch.

    tokens_per_s   sampled tokens that training consumed, per second, from the end of step SKIP to the end of the last
    cpu_s_per_1k   CPU seconds of all processes of the run, from its start to its end, per 1,000 of these tokens
    records        written to the ledger, and their size in KiB
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks._pairs import CHECKOUT, Side, add_arguments, compare
from benchmarks.without_ledger.sitecustomize import LOG, PATCHES
from realsys.config.paths import TrialPaths

PATCHED = Path(__file__).with_name("without_ledger")


def check(paths: TrialPaths, made: set[str], expected: set[str]) -> dict[str, Any]:
    """Return the figures of one run's ledger. Fails if a patch is missing, or was made in the wrong run."""
    if made != expected:
        raise SystemExit(f"{paths.root}: patched are {', '.join(sorted(made)) or 'none'}, not what was asked for")
    records = paths.ledger.read_bytes().count(b"\n")
    if records and expected:
        raise SystemExit(f"{paths.ledger}: {records} records were written without a ledger")
    return {"records": records, "ledger_kib": paths.ledger.stat().st_size / 1024}


def sides(root: Path) -> tuple[Side, Side]:
    log = root / "patched"

    def check_off(paths: TrialPaths) -> dict[str, Any]:
        made = set(log.read_text().split()) if log.exists() else set()
        log.unlink(missing_ok=True)
        return check(paths, made, set(PATCHES))

    def check_on(paths: TrialPaths) -> dict[str, Any]:
        return check(paths, set(log.read_text().split()) if log.exists() else set(), set())

    patched = {"PYTHONPATH": os.pathsep.join([str(PATCHED), str(CHECKOUT)]), LOG: str(log)}
    return Side("on", check=check_on), Side("off", environment=patched, check=check_off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    compare("ledger_cost", parser.parse_args(), sides)


if __name__ == "__main__":
    main()

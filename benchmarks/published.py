"""Published tables of asynchronous and synchronous training, and what the planner's cost model predicts for them.

    python -m benchmarks.published

It measures nothing: the figures are from the tables in realsys/lab/planner/tables, each with its source.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from benchmarks._table import report
from realsys.lab.planner.published import TABLES, Comparison, comparisons, table


def row(found: Comparison) -> dict[str, Any]:
    return {
        "table": found.table,
        "name": found.name,
        "parts": found.parts,
        "published": found.published,
        "predicted": found.predicted,
        "error_%": 100 * found.error,
        "sign_is_right": found.sign_is_right,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row(found) for found in comparisons()]
    errors = {name: [abs(each["error_%"]) for each in rows if each["table"] == name] for name in _names(rows)}
    meta = {
        "sources": [table(name)["source"] for name in TABLES],
        "wrong_signs": sum(not each["sign_is_right"] for each in rows),
        "pairs": len(rows),
        "median_error_%": {name: median(values) for name, values in errors.items()},
    }
    report("published", rows, meta)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(each["table"] for each in rows))


if __name__ == "__main__":
    main()

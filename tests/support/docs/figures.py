"""Measured figures of the pages, written from benchmarks/results/*.json.

    <!-- figures: NAME -->              TABLES[NAME] of figure_tables.py writes the lines up to the end mark
    <!-- end of figures -->

    <!-- figures of these rows:         the rows up to --> are written there, with their figures
    | staging | {weights[what=stage].GB/s:.1f} GB/s |
    -->
    <!-- end of figures -->

    {EXPRESSION}   [min|max|sum] FILE[key=value; key=value].FIELD*SCALE:FORMAT
                   FILE.meta.FIELD for a setting, FILE.FIELD for a file with one row or with min, max or sum

``python -m tests.support.docs.figures`` (`make docs`) rewrites all pages. A test fails if a page differs from that.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of figures -->"

_TABLE = re.compile(rf"(<!-- figures: (\w+) -->\n)(.*?)({END})", re.DOTALL)
_ROWS = re.compile(rf"(<!-- figures of these rows:\n(.*?)\n-->\n)(.*?)({END})", re.DOTALL)
_EXPRESSION = re.compile(r"(?:(min|max|sum) )?(\w+)(?:\[(.*?)\])?\.(meta\.)?(.+?)(?:\*([\d.e-]+))?:([^:]*)$")
_COMBINE: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": sum}

Result = dict[str, Any]
Row = dict[str, Any]


def load(name: str) -> Result:
    """Read a result. ``rows`` and ``meta`` are always there; chaos has its totals in ``meta``."""
    result: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return chaos_totals(result) if name == "chaos" else result


def chaos_totals(outcome: Result) -> Result:
    rows = [row for case in outcome["cases"] for row in case["rows"]]
    meta = {
        "faults": len(rows),
        "runs": len(outcome["cases"]),
        "survived": sum(row["outcome"] == "survived" for row in rows),
        "ended": sum(row["outcome"].startswith("ended: ") for row in rows),
        "not_injected": sum(row["outcome"] == "did not fire" for row in rows),
        "lost": sum(row["lost"] or 0 for row in rows),
        "twice": sum(row["twice"] or 0 for row in rows),
        "judged": sum(case["rejudged"] for case in outcome["cases"]),
    }
    return {"rows": rows, "meta": meta}


def rows_of(name: str, **wanted: object) -> list[Row]:
    """Return the rows of a result whose fields equal ``wanted``."""
    return [row for row in load(name)["rows"] if all(row.get(key) == value for key, value in wanted.items())]


def row_of(name: str, **wanted: object) -> Row:
    """Return the only such row. Raises ValueError if there is none or more than one."""
    rows = rows_of(name, **wanted)
    if len(rows) != 1:
        raise ValueError(f"{name}.json: {len(rows)} rows with {wanted}, expected 1")
    return rows[0]


def figure(expression: str) -> str:
    """Evaluate an expression. Raises ValueError, KeyError or FileNotFoundError if it names no figure."""
    match = _EXPRESSION.match(expression)
    if match is None:
        raise ValueError(f"figure {expression!r} cannot be read")
    combine, name, conditions, meta, field, scale, spec = match.groups()
    result = load(name)
    if meta:
        values = [_walk(result["meta"], field)]
    else:
        pairs = [condition.strip().split("=", 1) for condition in conditions.split(";")] if conditions else []
        rows = [row for row in result["rows"] if all(str(row.get(key)) == value for key, value in pairs)]
        values = [row[field] for row in rows if row.get(field) is not None]
    if not values or (len(values) > 1 and not combine):
        raise ValueError(f"figure {expression!r}: {len(values)} rows fit, expected 1")
    value = _COMBINE[combine](values) if combine else values[0]
    return format(value * float(scale) if scale else value, spec)


def _walk(mapping: Any, path: str) -> Any:
    for key in path.split("."):
        mapping = mapping[key]
    return mapping


def rewrite(page: str) -> str:
    """Return ``page`` with all tables as the results have them."""
    from tests.support.docs.figure_tables import TABLES

    page = _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[4]}", page)
    return _ROWS.sub(lambda match: f"{match[1]}\n{_filled(match[2])}\n\n{match[4]}", page)


def _filled(rows: str) -> str:
    return re.sub(r"\{(.+?)\}", lambda match: figure(match[1]), rows)


def without_figures(page: str) -> str:
    """Return ``page`` without its tables from results, code, links and comments."""
    page = _ROWS.sub("", _TABLE.sub("", page))
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^ {4}.*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", "", page)


def pages() -> Iterator[Path]:
    """Yield the pages that quote results."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if "<!-- figures" in path.read_text("utf-8"):
            yield path


def main() -> int:
    for path in pages():
        path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

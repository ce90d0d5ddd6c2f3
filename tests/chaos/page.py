"""``python -m tests.chaos.page``: write "As measured" of docs/chaos.md from the JSON of the last whole run."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.schedule.rows import PHASES, SUSPENDED
from tests.chaos.schedule.signals import STATELESS, TRAINING

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "chaos.json", ROOT / "docs" / "chaos.md"
HEAD = "## As measured\n"
_VICTIMS = [victim.removesuffix("/0") for victim in (*STATELESS, *TRAINING)]
_CAUSE_CHARS = 120

Row = Mapping[str, Any]


def main() -> int:
    if not RESULTS.exists():
        print(f"there is no {RESULTS.relative_to(ROOT)}: run `make chaos` first", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    before, head, _ = text.partition(HEAD)
    assert head, f"{PAGE} has no section {HEAD.strip()!r}"
    PAGE.write_text(before + section(json.loads(RESULTS.read_text())), encoding="utf-8")
    return 0


def section(outcome: Mapping[str, Any]) -> str:
    """The whole section, from its heading to the end of the page."""
    rows = [row for case in outcome["cases"] for row in case["rows"]]
    signals = {name: _matrix(rows, name) for name in ("SIGKILL", SUSPENDED)}
    shown = {id(row) for cells in signals.values() for row in cells.values()}
    rest = [row for row in rows if id(row) not in shown]
    parts = [HEAD, summary(outcome) + " Recovery in seconds, re-issued tickets in brackets.\n"]
    parts += [_matrix_table(name, cells) for name, cells in signals.items()]
    phases: dict[str, list[str]] = {}
    for row in rest:
        phases.setdefault(row["fault"], []).append(f"{row['phase']}: {_cell(row)}")
    parts.append(_table(("fault", "phase"), [(fault, "; ".join(cells)) for fault, cells in phases.items()]))
    return "\n".join(parts)


def summary(outcome: Mapping[str, Any]) -> str:
    """Return the counts of all outcomes in one or two sentences."""
    cases = outcome["cases"]
    rows = [row for case in cases for row in case["rows"]]
    skipped = [row for row in rows if row["outcome"].startswith("skipped")]
    survived = sum(row["outcome"] == "survived" for row in rows)
    ended = sum(row["outcome"].startswith("ended: ") for row in rows)
    other = len(rows) - len(skipped) - survived - ended
    faults = [f"{survived} survived", f"{ended} ended with the error that they should"]
    faults += [f"{other} neither"] if other else []
    missing = sorted({row["outcome"].removeprefix("skipped: ") for row in skipped})
    faults += [f"{len(skipped)} skipped ({', '.join(missing)})"] if skipped else []
    where = f"Seed {outcome['seed']}, {outcome['jobs']} runs at a time on {outcome['cores']} cores"
    lost, twice = (sum(row[name] or 0 for row in rows) for name in ("lost", "twice"))
    judged = sum(case["rejudged"] for case in cases)
    changed = sum("sample" in problem for case in cases for problem in case["problems"])
    return (
        f"{where}, {outcome['seconds'] / 60:.1f} minutes: {len(rows)} faults in {len(cases)} runs, "
        f"{', '.join(faults)}, {lost} lost, {twice} twice; {judged:,} trained completions judged again, "
        f"{changed or 'none'} of them otherwise."
    )


def _matrix(rows: Iterable[Row], signal: str) -> dict[tuple[str, str], Row]:
    """(phase, victim) -> row, of the runs that have one worker of each kind."""
    found = {
        (row["phase"], row["fault"].removeprefix(f"{signal} ")): row
        for row in rows
        if row["case"].startswith("signals-") and row["fault"].startswith(signal)
    }
    return {key: row for key, row in found.items() if key[0] in PHASES and key[1] in _VICTIMS}


def _matrix_table(signal: str, cells: Mapping[tuple[str, str], Row]) -> str:
    def cell(phase: str, victim: str) -> str:
        row = cells.get((phase, victim))
        return "-" if row is None else _cell(row)

    head = (f"{signal} of", *_VICTIMS)
    return _table(head, [(phase, *(cell(phase, victim) for victim in _VICTIMS)) for phase in PHASES])


def _cell(row: Row) -> str:
    return f"{_number(row['recovery_s'])} ({_reissued(row)})" if row["outcome"] == "survived" else _outcome(row)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines) + "\n"


def _outcome(row: Row) -> str:
    return re.sub(r"\s+", " ", row["outcome"]).replace("|", "\\|")[:_CAUSE_CHARS]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _reissued(row: Row) -> str:
    return "-" if row["reissued"] is None else str(row["reissued"])


if __name__ == "__main__":
    sys.exit(main())

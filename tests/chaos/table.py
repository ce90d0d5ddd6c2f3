"""The table of a chaos run, for people; the same rows go to JSON."""

from collections.abc import Iterable

from tests.chaos.driver import CaseResult, RowResult

HEAD = ("run", "fault", "phase", "outcome", "recovery s", "re-issued", "lost", "twice")


def render(results: Iterable[CaseResult]) -> str:
    """Markdown, one line per fault x phase."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    rows += [_cells(row) for result in results for row in result.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def _cells(row: RowResult) -> tuple[str, ...]:
    numbers = (row.reissued, row.lost, row.twice)
    took = "-" if row.recovery_s is None else f"{row.recovery_s:.1f}"
    return (row.case, row.fault, row.phase, row.outcome, took, *("-" if n is None else str(n) for n in numbers))

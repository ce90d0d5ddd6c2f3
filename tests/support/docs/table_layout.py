"""Markdown tables of measured figures."""

from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


def listing(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> str:
    """Return a table of ``rows``. ``columns`` maps a heading to the format of a cell, such as ``{seconds:.1f} s``."""
    return table(list(columns), ([cell.format_map(row) for cell in columns.values()] for row in rows))


def ratios(head: str, digits: int, rows: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table of ratios. ``rows`` maps a name to ``mean``, ``error``, ``least`` and ``greatest``."""
    columns = {
        head: "{name}",
        "mean": f"**{{mean:.{digits}f}}**",
        "standard error": f"{{error:.{digits}f}}",
        "least - greatest": "{least:.2f} - {greatest:.2f}",
    }
    return listing(columns, [{**row, "name": name} for name, row in rows.items()])

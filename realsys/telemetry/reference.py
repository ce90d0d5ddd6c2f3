"""Tables of all fields of the step log in docs/metrics.md. `make docs` writes them; a test compares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from realsys.telemetry.field_table import FIELDS, GROUPS, Field

BEGIN, END = "<!-- fields: written by `make docs` -->", "<!-- end of fields -->"

_TITLES = {
    "train": "`train`: a train step",
    "eval": "`eval`: an evaluation",
    "warmup": "`warmup`: a step of the supervised warm-up",
    "phase": "`phase`: a phase of the run begins",
    "recovered": "`recovered`: training continues from a checkpoint",
    "used_up": "`used_up`: the prompts ended before the planned steps",
}


def reference() -> str:
    """Return Markdown with a table for each kind of record."""
    return "\n".join(line for kind in FIELDS for line in _kind(kind)).strip() + "\n"


def rewrite(page: str) -> str:
    """Return ``page`` with new tables between the marks ``BEGIN`` and ``END``."""
    head, _, rest = page.partition(BEGIN)
    _, _, foot = rest.partition(END)
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{foot}"


def _kind(kind: str) -> Iterator[str]:
    yield f"### {_TITLES[kind]}\n"
    yield "| field | unit | meaning |\n|---|---|---|"
    for group in GROUPS:
        own = [field for field in FIELDS[kind].values() if field.group == group]
        if own and len({field.group for field in FIELDS[kind].values()}) > 1:
            yield f"| **{group}** | | |"
        yield from map(_row, own)
    yield ""


def _row(field: Field) -> str:
    escaped = field.meaning.replace("|", "\\|")
    return f"| `{field.name}` | {field.unit} | {escaped} |"


if __name__ == "__main__":
    path = Path("docs/metrics.md")
    path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")

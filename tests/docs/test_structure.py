"""docs/structure.md names every package of the tree, and nothing else; the drawing of layers is that of `make lint`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text("utf-8")
PACKAGES, READING = PAGE.split("## Where to start")
#: folder -> the folders in it
ROWS = {
    row[1].strip("` "): re.findall("`([^`]+)`", row[3])
    for row in (line.split("|") for line in PACKAGES.splitlines() if line.startswith("| `"))
}
LISTED = [*ROWS, *(f"{top}/{folder}" for top, folders in ROWS.items() for folder in folders)]
FILES = re.findall(r"`([^`]+\.py)`", READING)
#: Folders of tests by subject, which the page describes in one line.
TESTS = {"tests/unit", "tests/contracts", "tests/system", "tests/chaos", "tests/support"}


def tree() -> set[str]:
    """Folders with Python or YAML files. The links in realsys/ to folders of the top level are not followed."""
    folders = set()
    for top in ("realsys", "launch", "workers", "slurm", "configs", "benchmarks", "docs", "tests"):
        for pattern in ("*.py", "*.yaml"):
            folders |= {path.parent for path in (ROOT / top).rglob(pattern)}
    names = {folder.relative_to(ROOT).as_posix() for folder in folders}
    names = {name.removesuffix("/realsys_sglang_cpu") for name in names}
    return {next((top for top in TESTS if name.startswith(f"{top}/")), name) for name in names} - {"realsys", "tests"}


def test_every_package_is_on_the_page() -> None:
    assert sorted(tree() - set(LISTED)) == []


def test_every_line_names_a_folder() -> None:
    assert [name for name in LISTED if not (ROOT / name).is_dir()] == []
    assert sorted(set(LISTED) - tree()) == ["benchmarks/results", "docs", "tests"]


def test_drawing_of_layers_is_the_import_rule() -> None:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("realsys.", "") for layer in rules[0]["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert page.partition("## Layers")[2].split("```")[1].split("\n")[1:-1] == layers

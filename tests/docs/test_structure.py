"""docs/structure.md names every package of the tree, and nothing else."""

import re
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
#: Folders of tests by subject, which the page describes in one line.
TESTS = {"tests/unit", "tests/contracts", "tests/system", "tests/chaos", "tests/support"}


def tree():
    """Folders with Python or YAML files. The links in realsys/ to folders of the top level are not followed."""
    folders = set()
    for top in ("realsys", "launch", "workers", "slurm", "configs", "benchmarks", "docs", "tests"):
        for pattern in ("*.py", "*.yaml"):
            folders |= {path.parent for path in (ROOT / top).rglob(pattern)}
    names = {folder.relative_to(ROOT).as_posix() for folder in folders}
    names = {name.removesuffix("/realsys_sglang_cpu") for name in names}
    return {next((top for top in TESTS if name.startswith(f"{top}/")), name) for name in names} - {"realsys", "tests"}


def test_every_package_is_on_the_page():
    assert sorted(tree() - set(LISTED)) == []


def test_every_line_names_a_folder():
    assert [name for name in LISTED if not (ROOT / name).is_dir()] == []
    assert sorted(set(LISTED) - tree()) == ["benchmarks/results", "docs", "tests"]
